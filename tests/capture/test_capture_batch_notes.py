"""A resumed capture cuts the batches of the interrupted one, so features of the hf backend are equal bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from capture_toys import WatchedEngine, capture_run, random_rows
from coverings import gate_or_long

from draftworks.capture.batch_notes import ABANDONED_AFTER_S, FOLDER, Progress
from draftworks.capture.session import capture_features, capture_missing, write_manifest
from draftworks.config.run_files import CaptureRun
from draftworks.errors import StoreError
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import read_feature_set

ROWS = random_rows(48, seed=3, longest=40)


class Killed(Exception):
    """Simulate the end of a process: unpublished features are lost."""


def capture_until_killed(
    run: CaptureRun, watched: WatchedEngine, rows, after: int, rank: int = 0, world: int = 1
) -> None:
    """End a rank after some samples; shards are small, so that batches are stored in part."""

    def stop(at: Progress) -> None:
        if at.done >= after:
            raise Killed

    monkey = pytest.MonkeyPatch()
    monkey.setattr(LocalFeatureStore, "close", lambda store: None)
    try:
        with pytest.raises(Killed):
            capture_missing(run, watched, rows, rank, world, progress=stop)
    finally:
        monkey.undo()


def make_run_with_small_shards(target, folder: Path, **settings) -> CaptureRun:
    run = capture_run(target, folder, **settings)
    return run.model_copy(update={"capture": run.capture.model_copy(update={"shard_mb": 0})})


def read_features(run: CaptureRun) -> dict[str, dict[str, torch.Tensor]]:
    store = LocalFeatureStore(run.store.root)
    return {ref.sample_id: store.get(ref)[0] for ref in read_feature_set(run.out).refs}


def assert_bit_equal(one: CaptureRun, other: CaptureRun) -> None:
    first, second = read_features(one), read_features(other)
    assert first.keys() == second.keys()
    for sample_id, streams in first.items():
        assert all(torch.equal(tensor, second[sample_id][name]) for name, tensor in streams.items()), sample_id


def list_notes(run: CaptureRun) -> list[Path]:
    return list((run.store.root / FOLDER).glob("*"))


@pytest.fixture
def straight(tiny_target, tmp_path: Path, watched) -> CaptureRun:
    run = make_run_with_small_shards(tiny_target, tmp_path / "straight")
    capture_features(run, watched, ROWS)
    return run


@pytest.mark.parametrize("seed", gate_or_long(range(4), [0]))
def test_killed_again_and_again_it_equals_the_undisturbed_bit_for_bit(
    tiny_target, tmp_path: Path, watched, straight, seed
):
    run, draw = make_run_with_small_shards(tiny_target, tmp_path / "broken"), random.Random(seed)
    for _ in range(3):
        capture_until_killed(run, watched, ROWS, draw.randint(1, 9))
        lose_some(run, draw)
    capture_features(run, watched, ROWS)
    assert_bit_equal(run, straight)
    assert read_feature_set(run.out).data_version == read_feature_set(straight.out).data_version


def lose_some(run: CaptureRun, draw: random.Random) -> None:
    """Remove the newest shards, as if a kill had prevented their publication."""
    shards = sorted((run.store.root / "shards").iterdir())
    for shard in draw.sample(shards, len(shards) // 3):
        shard.unlink()


def test_a_batch_that_is_stored_in_part_is_computed_whole_and_stored_once(tiny_target, tmp_path: Path, watched):
    run = make_run_with_small_shards(tiny_target, tmp_path)
    capture_until_killed(run, watched, ROWS, 5)
    lost = sorted((run.store.root / "shards").iterdir())[0]
    lost.unlink()
    watched.rows.clear()
    summary = capture_features(run, watched, ROWS)
    assert len(watched.rows) > summary.captured
    assert LocalFeatureStore(run.store.root).health()["tensors"] == 3 * len(ROWS)


def test_ranks_and_another_number_of_them_change_no_bit(tiny_target, tmp_path: Path, watched):
    two, then_three, then_one = (
        make_run_with_small_shards(tiny_target, tmp_path / name) for name in ("two", "three", "one")
    )
    for rank in range(2):
        capture_missing(two, watched, ROWS, rank, 2)
    write_manifest(two, ROWS)
    for run, world in ((then_three, 3), (then_one, 1)):
        for rank in range(2):
            capture_until_killed(run, watched, ROWS, 6 + rank, rank, 2)
        shares = [capture_missing(run, watched, ROWS, rank, world) for rank in range(world)]
        assert all(share.captured > 0 for share in shares)
        write_manifest(run, ROWS)
        assert_bit_equal(run, two)


def test_a_rank_that_starts_late_cuts_as_if_nothing_were_stored(tiny_target, tmp_path: Path, watched):
    """A rank's share is computed from what was missing when the first rank began, whatever was stored since."""
    early, late = (make_run_with_small_shards(tiny_target, tmp_path / name) for name in ("early", "late"))
    for rank in (0, 1):
        capture_missing(early, watched, ROWS, rank, 2)
    for rank in (1, 0):
        capture_missing(late, watched, ROWS, rank, 2)
    write_manifest(early, ROWS)
    write_manifest(late, ROWS)
    assert_bit_equal(early, late)


def test_a_complete_capture_leaves_no_note_and_new_data_is_cut_alone(tiny_target, tmp_path: Path, watched):
    run = make_run_with_small_shards(tiny_target, tmp_path)
    capture_until_killed(run, watched, ROWS[:40], 4)
    assert len(list_notes(run)) == 1
    capture_features(run, watched, ROWS[:40])
    assert list_notes(run) == []
    watched.rows.clear()
    assert capture_features(run, watched, ROWS).captured == len(watched.rows) == 8


def test_another_backend_computes_no_more_than_is_missing(tiny_target, tmp_path: Path, watched):
    run = make_run_with_small_shards(tiny_target, tmp_path)
    run = run.model_copy(update={"capture": run.capture.model_copy(update={"backend": "sglang_server"})})
    capture_until_killed(run, watched, ROWS, 5)
    sorted((run.store.root / "shards").iterdir())[0].unlink()
    watched.rows.clear()
    assert capture_features(run, watched, ROWS).captured == len(watched.rows)
    assert not (run.store.root / FOLDER).exists()


@pytest.mark.parametrize("text", ["", "[]", '{"world": 0, "rows": [1]}', '{"world": 1, "rows": [4, 2]}', "[" * 50_000])
def test_a_note_that_cannot_be_read_is_made_anew(tiny_target, tmp_path: Path, watched, text: str):
    run = make_run_with_small_shards(tiny_target, tmp_path)
    capture_until_killed(run, watched, ROWS, 5)
    list_notes(run)[0].write_text(text)
    capture_features(run, watched, ROWS)
    assert len(read_features(run)) == len(ROWS)


def test_what_was_lost_after_the_beginning_is_captured_too(tiny_target, tmp_path: Path, watched):
    run = make_run_with_small_shards(tiny_target, tmp_path)
    capture_features(run, watched, ROWS[:10])
    capture_until_killed(run, watched, ROWS, 5)
    sorted((run.store.root / "shards").iterdir())[0].unlink()  # of the first ten
    capture_features(run, watched, ROWS)
    assert len(read_features(run)) == len(ROWS)


def test_notes_of_captures_that_nobody_went_on_with_are_removed(tiny_target, tmp_path: Path, watched):
    run = make_run_with_small_shards(tiny_target, tmp_path)
    capture_until_killed(run, watched, ROWS[:20], 4)
    abandoned = list_notes(run)[0]
    os.utime(abandoned, (0, abandoned.stat().st_mtime - 2 * ABANDONED_AFTER_S))
    capture_until_killed(run, watched, ROWS, 4)
    assert abandoned not in list_notes(run)


def test_a_note_that_another_process_renames_meanwhile_stops_nobody(tiny_target, tmp_path: Path, watched, monkeypatch):
    """Two captures that begin at once in a shared store: one looks through the folder while the other writes there."""
    run = make_run_with_small_shards(tiny_target, tmp_path)
    folder = run.store.root / FOLDER
    listed, iterate = [folder / ".other.json.7.own.7.tmp"], Path.iterdir

    def with_a_vanished_file(path: Path) -> Iterator[Path]:
        return iter([*listed, *iterate(path)]) if path == folder else iterate(path)

    monkeypatch.setattr(Path, "iterdir", with_a_vanished_file)
    capture_features(run, watched, ROWS[:10])
    assert len(read_features(run)) == 10


def test_a_folder_that_cannot_be_written_is_named(tiny_target, tmp_path: Path, watched):
    run = make_run_with_small_shards(tiny_target, tmp_path)
    run.store.root.mkdir(parents=True)
    (run.store.root / FOLDER).write_text("in the way")
    with pytest.raises(StoreError, match=rf"{FOLDER}.*cannot be read or written"):
        capture_features(run, watched, ROWS)
    assert watched.loads == 0
