"""A capture stores exactly the missing features, survives a kill at any moment, and rejects wrong input.
Progress: the remaining time and its format.
Failed samples are left out up to the allowed share; a failing engine ends the run.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from capture_toys import WatchedEngine, capture_run, random_rows
from coverings import gate_or_long

from draftworks.capture.batch_notes import Progress
from draftworks.capture.capture_plan import make_batches, plan_capture
from draftworks.capture.session import capture_features, capture_missing, write_manifest
from draftworks.data.conversations import QUARANTINE_FILE
from draftworks.data.tokenized import TokenRow
from draftworks.errors import CaptureError, EngineError, StoreError
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import read_feature_set
from draftworks.storage.identity import token_digest


def read_features(run, tokens) -> dict[str, dict[str, torch.Tensor]]:
    refs = read_feature_set(run.out).refs
    assert [ref.sample_id for ref in refs] == [row.sample_id for row in tokens]
    store = LocalFeatureStore(run.store.root)
    return {ref.sample_id: store.get(ref)[0] for ref in refs}


def assert_close(one, other):
    assert one.keys() == other.keys()
    for sample_id in one:
        for name, tensor in one[sample_id].items():
            assert torch.allclose(tensor, other[sample_id][name], atol=2e-4, rtol=1e-4)


def test_features_are_those_of_the_engine(tiny_target, tmp_path: Path, watched: WatchedEngine):
    run, tokens = capture_run(tiny_target, tmp_path), random_rows(12)
    summary = capture_features(run, watched, tokens)
    stored = read_features(run, tokens)
    expected = {row.sample_id: watched.capture([row.input_ids.tolist()], [])[0] for row in random_rows(12)}
    for sample_id, streams in expected.items():
        assert list(stored[sample_id]) == ["hf2", "hf4", "last"]
        assert torch.allclose(stored[sample_id]["last"], streams["last"], atol=2e-4)
    assert summary.captured == summary.samples == 12
    assert summary.features == 36
    assert summary.nbytes == 3 * 128 * 4 * summary.tokens


def test_refs_name_the_tokens_they_are_of(tiny_target, tmp_path: Path, watched):
    run, tokens = capture_run(tiny_target, tmp_path), random_rows(3)
    capture_features(run, watched, tokens)
    named = [ref.metadata["tokens"] for ref in read_feature_set(run.out).refs]
    assert named == [token_digest(row.input_ids.tolist()) for row in tokens]


def test_stored_dtype_is_as_configured(tiny_target, tmp_path: Path, watched):
    run, tokens = capture_run(tiny_target, tmp_path, dtype="bfloat16"), random_rows(2)
    capture_features(run, watched, tokens)
    assert all(t.dtype == torch.bfloat16 for streams in read_features(run, tokens).values() for t in streams.values())


def test_second_run_loads_no_engine(tiny_target, tmp_path: Path, watched):
    run, tokens = capture_run(tiny_target, tmp_path), random_rows(5)
    capture_features(run, watched, tokens)
    before = read_feature_set(run.out)
    assert capture_features(run, watched, tokens).captured == 0
    assert watched.loads == 1
    assert read_feature_set(run.out) == before


def test_five_percent_new_samples_capture_five_percent(tiny_target, tmp_path: Path, watched):
    run, rows = capture_run(tiny_target, tmp_path), random_rows(42, longest=8)
    capture_features(run, watched, rows[:40])
    watched.rows.clear()
    summary = capture_features(run, watched, rows)
    assert summary.captured == len(watched.rows) == 2
    assert len(read_features(run, rows)) == 42


def test_second_tap_set_captures_only_missing_taps(tiny_target, tmp_path: Path, watched):
    run, tokens = capture_run(tiny_target, tmp_path), random_rows(4)
    capture_features(run, watched, tokens)
    watched.taps.clear()
    wider = run.model_copy(update={"taps": [1, 2, 4]})
    summary = capture_features(wider, watched, tokens)
    assert watched.taps == {"hf1"}
    assert summary.features == 4
    assert LocalFeatureStore(run.store.root).health()["tensors"] == 16


def test_repeated_tokens_are_captured_once(tiny_target, tmp_path: Path, watched):
    rows = random_rows(3)
    tokens = [*rows, *(replace(row, sample_id=f"again-{row.sample_id}") for row in rows)]
    run = capture_run(tiny_target, tmp_path)
    assert capture_features(run, watched, tokens).captured == 3
    assert len(read_features(run, tokens)) == 6


def test_keys_do_not_depend_on_batches_order_or_ranks(tiny_target, tmp_path: Path, watched):
    rows, versions = random_rows(9), []
    for number, batch_tokens in enumerate((1, 64, 10_000)):
        run = capture_run(tiny_target, tmp_path / str(number), batch_tokens=batch_tokens)
        tokens = rows[:: 1 if number else -1]
        for rank in range(number + 1):
            capture_missing(run, watched, tokens, rank, number + 1)
        versions.append(write_manifest(run, tokens).data_version)
    assert len(set(versions)) == 1


def test_ranks_share_the_work_without_overlap(tiny_target, tmp_path: Path, watched):
    run, tokens = capture_run(tiny_target, tmp_path), random_rows(20)
    first = capture_missing(run, watched, tokens, 0, 2)
    with pytest.raises(StoreError, match="samples lack features"):
        write_manifest(run, tokens)
    second = capture_missing(run, watched, tokens, 1, 2)
    assert first.captured + second.captured == 20
    assert min(first.captured, second.captured) > 0
    assert write_manifest(run, tokens).samples == 20


def test_batches_hold_similar_lengths_within_the_token_limit(tiny_target, tmp_path: Path):
    run, tokens = capture_run(tiny_target, tmp_path), random_rows(40)
    plan = plan_capture(run, tokens, LocalFeatureStore(run.store.root))
    made = list(make_batches(plan.jobs, 90))
    assert sorted(job.row for batch in made for job in batch) == list(range(40))
    assert all(len(batch) * max(job.num_tokens for job in batch) <= 90 or len(batch) == 1 for batch in made)


def test_progress_ends_complete(tiny_target, tmp_path: Path, watched):
    seen: list[Progress] = []
    capture_features(capture_run(tiny_target, tmp_path), watched, random_rows(12), seen.append)
    assert seen[-1].done == seen[-1].total == 12
    assert seen[-1].eta_s == 0
    assert seen[-1].tokens_per_s > 0


def test_resumed_equals_straight(tiny_target, tmp_path: Path, watched):
    tokens, straight, broken = random_rows(30), *(capture_run(tiny_target, tmp_path / n) for n in "ab")
    capture_features(straight, watched, tokens)

    class Stop(Exception):
        pass

    def stop(at: Progress) -> None:
        if at.done >= 10:
            raise Stop

    with pytest.raises(Stop):
        capture_missing(broken, watched, tokens, progress=stop)
    resumed = capture_features(broken, watched, tokens)
    assert 0 < resumed.captured < 30
    assert read_feature_set(broken.out).data_version == read_feature_set(straight.out).data_version
    assert_close(read_features(broken, tokens), read_features(straight, tokens))


@pytest.mark.parametrize("batches_seen", gate_or_long([3, 20], [20]))
def test_kill_at_any_moment_leaves_a_store_that_completes(tiny_target, tmp_path: Path, watched, batches_seen):
    run = capture_run(tiny_target, tmp_path, shard_mb=1)
    path = run.save(tmp_path / "run.yaml")
    worker = Path(__file__).parents[1] / "toys" / "capture_worker.py"
    process = subprocess.Popen([sys.executable, worker, path, "150"], stdout=subprocess.PIPE, text=True)
    for _ in range(1 + batches_seen):
        assert process.stdout.readline()
    time.sleep(random.Random(batches_seen).random() * 0.03)
    process.kill()
    process.wait()
    process.stdout.close()
    tokens = random_rows(150, seed=1, longest=40)
    assert LocalFeatureStore(run.store.root).verify().ok
    capture_features(run, watched, tokens)
    assert not list((run.store.root / "staging").iterdir())
    assert LocalFeatureStore(run.store.root).verify().ok
    assert len(read_features(run, tokens)) == 150


def test_budget_is_refused_before_the_engine_is_loaded(tiny_target, tmp_path: Path, watched):
    rows = random_rows(5)
    run = capture_run(tiny_target, tmp_path)
    capture_features(run, watched, rows[:1])
    before = sorted((path, path.stat().st_mtime_ns) for path in run.store.root.rglob("*"))
    small = run.model_copy(update={"capture": run.capture.model_copy(update={"budget_gb": 1e-6})})
    with pytest.raises(CaptureError, match=r"would store 0.\d+ GB, more than capture.budget_gb = 1e-06"):
        capture_features(small, watched, rows)
    assert watched.loads == 1
    assert sorted((path, path.stat().st_mtime_ns) for path in run.store.root.rglob("*")) == before


def test_a_disk_without_room_is_refused_before_the_engine_is_loaded(tiny_target, tmp_path: Path, watched, monkeypatch):
    run, rows = capture_run(tiny_target, tmp_path), random_rows(5)
    needed = sum(3 * 128 * 4 * len(row.input_ids) for row in rows)
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=needed - 1)

    monkeypatch.setattr("draftworks.capture.capture_plan.shutil.disk_usage", disk_usage)
    with pytest.raises(CaptureError, match=rf"the disk of {run.store.root} has 0.\d+ GB left. Nothing was stored"):
        capture_features(run, watched, rows)
    assert watched.loads == 0
    assert all(run.store.root.resolve().is_relative_to(path) for path in asked)
    monkeypatch.setattr("draftworks.capture.capture_plan.shutil.disk_usage", lambda path: SimpleNamespace(free=needed))
    assert capture_features(run, watched, rows).captured == 5


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.full(513, 5, np.int32), "sample bad: 513 tokens, expected 1 to 512"),
        (np.array([], np.int32), "sample bad: 0 tokens"),
        (np.array([5, 2048], np.int32), "sample bad: token ids 5..2048, expected 0..2047"),
        (np.array([-1, 3], np.int32), "sample bad: token ids -1..3"),
    ],
)
def test_bad_samples_are_named_before_the_engine_is_loaded(tiny_target, tmp_path: Path, watched, ids, message):
    with pytest.raises(CaptureError, match=message):
        capture_features(
            capture_run(tiny_target, tmp_path),
            watched,
            [*random_rows(2), TokenRow("bad", ids, np.ones(len(ids), np.bool_))],
        )
    assert watched.loads == 0


def test_taps_outside_the_target_are_refused(tiny_target, tmp_path: Path, watched):
    run = capture_run(tiny_target, tmp_path).model_copy(update={"taps": [2, 8]})
    with pytest.raises(CaptureError, match=r"layer taps \[8\] are outside it, expected 0..7"):
        capture_features(run, watched, random_rows(2))
    assert watched.loads == 0


def test_damaged_shard_stops_capture_before_the_engine_is_loaded(tiny_target, tmp_path: Path, watched):
    run, tokens = capture_run(tiny_target, tmp_path), random_rows(3)
    capture_features(run, watched, tokens)
    shard = next((run.store.root / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StoreError, match=rf"{shard.name}.*truncated.*Delete this shard and capture again"):
        capture_features(run, watched, tokens)
    assert watched.loads == 1
    shard.unlink()
    assert capture_features(run, watched, tokens).captured == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: {**s, "hf2": s["hf2"] * float("nan")}, "stream hf2: .* not finite"),
        (lambda s: {**s, "hf4": torch.cat([s["hf4"], s["hf4"][:1]])}, "stream hf4: expected"),
        (lambda s: {**s, "last": s["last"] * 2}, "stream last: the target's head on it differs"),
    ],
)
def test_wrong_features_are_not_stored(tiny_target, tmp_path: Path, watched, damage, message):
    run = capture_run(tiny_target, tmp_path)
    watched.damage = damage
    with pytest.raises(CaptureError, match=message):
        capture_features(run, watched, random_rows(3))
    assert LocalFeatureStore(run.store.root).health()["tensors"] == 0


def test_rest_takes_as_long_as_its_share_says():
    at = Progress("samples", done=3, total=12, share=0.25, tokens=100, seconds=10.0)
    assert at.eta_s == 30
    assert at.summarize() == {"samples": "3/12", "tokens": 100, "tokens/s": 10, "eta": "30s"}


def test_long_waits_are_told_in_their_largest_units():
    seconds = (59.4, 60, 3599, 3600, 86399, 90000, 180000)
    etas = [Progress("samples", 1, 2, 0.5, 0, each).summarize()["eta"] for each in seconds]
    assert etas == ["59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d01h", "2d02h"]


def test_nothing_is_promised_before_anything_is_done():
    assert Progress("samples", done=0, total=12, share=0.0, tokens=0, seconds=0.0).summarize()["eta"] == "?"


class Failing(WatchedEngine):
    """Engine that refuses batches with a certain token, as a server that answers a whole batch with one error."""

    token = -1

    def capture(self, sequences, taps):
        if any(self.token in row for row in sequences):
            raise CaptureError("the engine lost rows")
        return super().capture(sequences, taps)


def make_failing_engine(engine, tokens, index: int) -> Failing:
    """An engine that fails on one sample, recognised by a token that no other sample has."""
    failing = Failing(engine)
    failing.token = 1999
    tokens[index].input_ids[0] = failing.token
    return failing


def test_failing_samples_are_left_out_with_their_reason(tiny_target, tmp_path: Path, tiny_engine):
    tokens = random_rows(8, vocab=1900)
    engine = make_failing_engine(tiny_engine, tokens, 3)
    twin = replace(tokens[3], sample_id="twin")
    run = capture_run(tiny_target, tmp_path, max_failed_share=0.25)
    run.out.mkdir()
    summary = capture_features(run, engine, [*tokens, twin])
    manifest = read_feature_set(run.out)
    assert summary.captured == 7
    assert [ref.sample_id for ref in manifest.refs] == [row.sample_id for row in tokens if row is not tokens[3]]
    lines = [json.loads(line) for line in (run.out / QUARANTINE_FILE).read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == [tokens[3].sample_id, "twin"]
    assert all("the engine lost rows" in line["reason"] for line in lines)
    assert [ref.metadata["row"] for ref in manifest.refs] == [0, 1, 2, 4, 5, 6, 7]


def test_more_failing_samples_than_allowed_stop_the_run_and_keep_the_rest(tiny_target, tmp_path: Path, tiny_engine):
    tokens = random_rows(8, vocab=1900)
    engine = make_failing_engine(tiny_engine, tokens, 3)
    run = capture_run(tiny_target, tmp_path)
    with pytest.raises(CaptureError, match=f"sample {tokens[3].sample_id}: the engine lost rows"):
        capture_features(run, engine, tokens)
    engine.token = -1
    assert capture_features(run, engine, tokens).captured < len(tokens)


def test_an_engine_that_cannot_go_on_stops_the_run_at_once(tiny_target, tmp_path: Path, tiny_engine):
    class Dead(WatchedEngine):
        def capture(self, sequences, taps):
            self.rows += sequences
            raise EngineError("it does not start")

    dead = Dead(tiny_engine)
    with pytest.raises(EngineError, match="it does not start"):
        capture_features(capture_run(tiny_target, tmp_path, max_failed_share=0.9), dead, random_rows(8))
    assert len(dead.rows) < 8
