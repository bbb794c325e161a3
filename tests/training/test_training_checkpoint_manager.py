"""A checkpoint is complete or absent, a run touches only its own, and neither the best nor the newest is ever dropped.
What goes wrong on one rank is raised on all of them, and what rank 0 finds is what all believe.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import (
    METRIC,
    PHASES,
    assert_holds,
    assert_whole,
    break_phase,
    break_renames,
    contents,
    limited_file_size,
    names,
    save_best,
    save_steps,
    snapshot_of,
)
from gloo_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from waiting import HANG_S

from draftworks.distributed.collectives import broadcast_from_rank_0, max_over_ranks, run_on_every_rank
from draftworks.errors import ConfigError, StoreError
from draftworks.training import checkpoint_manager
from draftworks.training.checkpoint_files import RECORD, read_record
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.snapshot import Snapshot


class KilledError(BaseException):
    """Stands for a process that dies: nothing in the code under test catches it."""


ERRORS = (OSError(28, "No space left on device"), KilledError())


def test_what_is_saved_is_read_back(tmp_path: Path):
    manager = CheckpointManager(tmp_path, "run")
    manager.save(snapshot_of(3), 3)
    assert_holds(manager.latest_dir(), snapshot_of(3))
    record = read_record(manager.latest_dir())
    assert (record.run_id, record.step, record.world_size) == ("run", 3, 1)
    assert record.bytes == sum(len(d) for name, d in contents(manager.latest_dir()).items() if name != RECORD)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("error", ERRORS, ids=["disk full", "killed"])
def test_a_save_that_fails_in_any_phase_is_as_if_it_had_not_begun(tmp_path: Path, monkeypatch, phase, error):
    manager = CheckpointManager(tmp_path, "run")
    save_best(manager, 1, 0.5)
    save_steps(manager, 2)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        break_phase(patch, phase, error)
        with pytest.raises(StoreError if isinstance(error, OSError) else KilledError):
            save_steps(manager, 3)
    after = CheckpointManager(tmp_path, "run")
    assert after.steps() == [1, 2]
    assert (after.latest_dir(), after.best_dir()) == (after.folder.final(2), after.folder.final(1))
    assert {name: data for name, data in contents(tmp_path).items() if ".partial" not in name} == before
    save_steps(after, 3)
    assert after.steps() == [1, 2, 3]
    assert_whole(after.folder.final(3))


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "rename"])
def test_a_failed_save_of_a_step_that_is_there_keeps_what_is_there(tmp_path: Path, monkeypatch, phase: str):
    manager = CheckpointManager(tmp_path, "run")
    save_steps(manager, 1, 2)
    before = contents(tmp_path)
    break_phase(monkeypatch, phase, ERRORS[0])
    with pytest.raises(StoreError, match="No space left"):
        manager.save(snapshot_of(99), 2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("error", ERRORS, ids=["disk full", "killed"])
@pytest.mark.parametrize("renamed", ["run-step2.old.partial", "run-step2"])
def test_replacing_a_step_leaves_the_old_one_the_new_one_or_none(tmp_path: Path, monkeypatch, error, renamed: str):
    manager = CheckpointManager(tmp_path, "run")
    save_steps(manager, 1, 2)
    with monkeypatch.context() as patch:
        break_renames(patch, error, lambda target: target.name == renamed)
        with pytest.raises((StoreError, KilledError)):
            save_steps(manager, 2)
    killed_between = renamed == "run-step2" and isinstance(error, KilledError)
    assert manager.steps() == ([1] if killed_between else [1, 2])
    for step in manager.steps():
        assert_whole(manager.folder.final(step))
    save_steps(manager, 2)
    assert names(tmp_path) == ["run-latest.json", "run-step1", "run-step2"]
    assert_whole(manager.folder.final(2))


def test_a_disk_error_leaves_nothing_that_fills_the_disk(tmp_path: Path, monkeypatch):
    break_phase(monkeypatch, "write_record", ERRORS[0])
    with pytest.raises(StoreError):
        save_steps(CheckpointManager(tmp_path, "run"), 1)
    assert names(tmp_path) == []


def test_only_the_leftovers_of_the_same_run_are_swept(tmp_path: Path):
    mine = ["run-step7.partial", "run-step8.old.partial"]
    others = ["other-step7.partial", "run-step7-step1.partial", "run2-step8.old.partial", "run-stepx.partial"]
    for name in mine + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.safetensors").write_bytes(b"half")
    save_steps(CheckpointManager(tmp_path, "run"), 1)
    assert names(tmp_path) == sorted([*others, "run-latest.json", "run-step1"])


@pytest.mark.parametrize("other", ["a-step5", "a.b", "ab", "a-latest.json", "a-step5.partial"])
def test_runs_in_one_folder_do_not_touch_each_other(tmp_path: Path, other: str):
    first, second = (CheckpointManager(tmp_path, name, max_checkpoints=1) for name in ("a", other))
    save_best(first, 5, 0.5)
    save_best(second, 3, 0.7)
    save_steps(first, 6)
    save_steps(second, 4)
    for run_id, manager, step in (("a", first, 5), (other, second, 3)):
        again = CheckpointManager(tmp_path, run_id)
        assert again.steps() == manager.steps() == [step, step + 1]
        assert again.best_dir() == tmp_path / f"{run_id}-step{step}"
    kept = {name: data for name, data in contents(tmp_path).items() if not name.startswith("a-step1/")}
    save_steps(CheckpointManager(tmp_path, "a"), 1)
    theirs = {name: data for name, data in kept.items() if name.startswith((f"{other}-step", f"{other}-best"))}
    assert len(theirs) > 8
    assert theirs.items() <= contents(tmp_path).items()


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
@pytest.mark.parametrize("best", [None, 1, 3, 5])
def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path, keep: int, best: int | None):
    manager = CheckpointManager(tmp_path, "run", max_checkpoints=keep)
    for step in range(1, 6):
        save_best(manager, step, 0.5) if step == best else save_steps(manager, step)
    assert manager.steps() == sorted({*range(6 - (keep or 5), 6)} | ({best} if best else set()))
    for step in manager.steps():
        assert_whole(manager.folder.final(step))


def test_a_new_best_lets_the_old_one_go(tmp_path: Path):
    manager = CheckpointManager(tmp_path, "run", max_checkpoints=1)
    save_best(manager, 1, 0.5)
    save_steps(manager, 2)
    save_best(manager, 3, 0.6)
    assert manager.steps() == [3]


def test_an_old_checkpoint_that_cannot_be_removed_is_only_warned_of(tmp_path: Path, monkeypatch, caplog):
    manager = CheckpointManager(tmp_path, "run", max_checkpoints=1)
    save_steps(manager, 1)
    break_renames(monkeypatch, PermissionError("held by a reader"), lambda target: target.name == "run-step1.partial")
    save_steps(manager, 2)
    assert manager.steps() == [1, 2]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"checkpoint {tmp_path / 'run-step1'} cannot be removed: held by a reader"]


def test_pointers_survive_a_copy_of_the_folder(tmp_path: Path):
    manager = CheckpointManager(tmp_path / "here", "run")
    save_best(manager, 1, 0.5)
    save_steps(manager, 2)
    shutil.move(shutil.copytree(tmp_path / "here", tmp_path / "copy"), tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    copy = CheckpointManager(tmp_path / "there", "run")
    assert (copy.latest_dir(), copy.best_dir()) == (tmp_path / "there" / "run-step2", tmp_path / "there" / "run-step1")
    for kind, folder in (("latest", copy.latest_dir()), ("best", copy.best_dir())):
        pointer = json.loads((tmp_path / "there" / f"run-{kind}.json").read_text())
        assert tmp_path / "there" / pointer["checkpoint"] == folder
        assert str(tmp_path) not in json.dumps(pointer)


@pytest.mark.parametrize(("best", "remembered"), [(1, 1), (2, None), (3, None)])
def test_saving_a_step_ends_the_timeline_there(tmp_path: Path, best: int, remembered: int | None):
    manager = CheckpointManager(tmp_path, "run")
    for step in (1, 2, 3, 4):
        save_best(manager, step, 0.5) if step == best else save_steps(manager, step)
    again = CheckpointManager(tmp_path, "run")
    again.save(snapshot_of(22), 2)
    for found in (again, CheckpointManager(tmp_path, "run")):
        assert found.steps() == [1, 2]
        assert found.latest_dir() == found.folder.final(2)
        assert (None if found.best is None else found.best.step) == remembered
    assert read_record(again.folder.final(2)).state == {"position": 22}
    assert again.is_better({METRIC: 0.4}) == (remembered is None)


def test_the_newest_complete_checkpoint_counts_not_what_the_pointer_says(tmp_path: Path):
    manager = CheckpointManager(tmp_path, "run")
    assert manager.latest_dir() is None
    save_steps(manager, 1, 2)
    (manager.folder.final(2) / "model.safetensors").unlink()
    assert manager.latest_dir() == manager.folder.final(1)
    (tmp_path / "run-latest.json").write_text("{")
    assert manager.latest_dir() == manager.folder.final(1)


@pytest.fixture
def held_writes(monkeypatch) -> threading.Event:
    """Writing begins when the event is set."""
    released, write = threading.Event(), checkpoint_manager.save_weights_and_rng
    monkeypatch.setattr(
        checkpoint_manager, "save_weights_and_rng", lambda *args: released.wait(HANG_S) and write(*args)
    )
    return released


def test_an_asynchronous_save_is_of_the_state_when_it_was_asked_for(tmp_path: Path, held_writes: threading.Event):
    manager, state = CheckpointManager(tmp_path, "run", save_async=True), snapshot_of(1)
    manager.save(state, 1)
    state.weights["w"].zero_()
    state.moments["w.exp_avg"].zero_()
    state.rng["cpu"].zero_()
    assert manager.steps() == []
    held_writes.set()
    manager.wait()
    assert_holds(manager.folder.final(1), snapshot_of(1))


def test_asynchronous_saves_follow_each_other(tmp_path: Path):
    manager = CheckpointManager(tmp_path, "run", max_checkpoints=2, save_async=True)
    save_steps(manager, 1, 2, 3)
    assert manager.latest_dir() == manager.folder.final(3)
    assert manager.steps() == [2, 3]
    for step in manager.steps():
        assert_whole(manager.folder.final(step))


@pytest.mark.parametrize("surface", ["wait", "save", "is_better", "update_best", "latest_dir"])
def test_an_error_of_an_asynchronous_save_surfaces_once(tmp_path: Path, monkeypatch, surface: str):
    manager = CheckpointManager(tmp_path, "run", save_async=True)
    with monkeypatch.context() as patch:
        break_phase(patch, "sync_and_checksum", ERRORS[0])
        save_steps(manager, 1)
        manager._writer.shutdown(wait=True)
    asked = {
        "wait": manager.wait,
        "save": lambda: save_steps(manager, 2),
        "is_better": lambda: manager.is_better({METRIC: 1.0}),
        "update_best": lambda: manager.update_best(1, {METRIC: 1.0}),
        "latest_dir": manager.latest_dir,
    }
    with pytest.raises(StoreError, match="No space left"):
        asked[surface]()
    manager.wait()
    assert (manager.latest_dir(), manager.best_dir()) == (None, None)


@pytest.mark.parametrize(("step", "best"), [(1, None), (2, 2), (3, 2)])
def test_a_best_of_steps_that_a_resume_goes_back_before_is_forgotten(tmp_path: Path, step: int, best: int | None):
    """Else the training would end with weights of a timeline that was given up."""
    manager = CheckpointManager(tmp_path, "run", max_checkpoints=5)
    save_steps(manager, 1)
    save_best(manager, 2, 0.5)
    save_steps(manager, 3)
    again = CheckpointManager(tmp_path, "run", max_checkpoints=5)
    again.resume(again.folder.final(step), step)
    assert (None if again.best is None else again.best.step) == best


RNG_FILE, MOMENTS_FILE = 5128, 8000  # bytes, at least
UNLIMITED = -1


def share_of(step: int, rank: int) -> Snapshot:
    """This rank's part of a snapshot; its moments are its largest file."""
    moment = torch.full((2 * MOMENTS_FILE // 4, 1), float(step))
    whole = snapshot_of(step, {"w.exp_avg": distribute_tensor(moment, init_device_mesh("cpu", (2,)), [Shard(0)])})
    return Snapshot(whole.state, whole.weights if rank == 0 else {}, whole.moments, whole.rng, whole.documents)


def on_one_rank_only(rank: int, folder: Path) -> None:
    manager = CheckpointManager(folder, "run")
    manager.save(share_of(1, rank), 1)
    before = contents(folder)
    for limit, part in ((RNG_FILE - 1, "rng/rank1"), (MOMENTS_FILE - 1, "optimizer/")):
        with limited_file_size(limit if rank == 1 else UNLIMITED):
            assert_refused(manager, rank, failing=1, said=f"{part}.*File too large")
        assert_nothing_happened(folder, before)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            break_phase(patch, "rename", OSError(28, "No space left on device"))
        assert_refused(manager, rank, failing=0, said="No space left")
    assert_nothing_happened(folder, before)
    manager.save(share_of(2, rank), 2)
    assert manager.latest_dir() == folder / "run-step2"


def assert_refused(manager: CheckpointManager, rank: int, failing: int, said: str) -> None:
    """On every rank, with what the failing one says; the others hear which it was."""
    with pytest.raises(StoreError, match=said) as error:
        manager.save(share_of(2, rank), 2)
    assert rank == failing or f"rank {failing}: " in str(error.value)


def assert_nothing_happened(folder: Path, before: dict[str, bytes]) -> None:
    dist.barrier()
    assert contents(folder) == before
    dist.barrier()


def test_the_disk_error_of_one_rank_is_raised_on_all_and_leaves_what_was_there(tmp_path: Path):
    on_ranks(2, tmp_path, on_one_rank_only, tmp_path / "output")
    assert names(tmp_path / "output") == ["run-latest.json", "run-step1", "run-step2"]
    for step in (1, 2):
        folder = tmp_path / "output" / f"run-step{step}"
        assert_whole(folder)
        assert names(folder / "rng") == ["rank0.safetensors", "rank1.safetensors"]


def rank_0_decides(rank: int, folder: Path) -> None:
    manager = CheckpointManager(folder, "run")
    assert manager.is_better({METRIC: 0.5 if rank == 0 else math.nan})
    manager.save(share_of(1, rank), 1)
    manager.update_best(1, {METRIC: 0.5})
    assert not manager.is_better({METRIC: 0.4 if rank == 0 else 0.9})
    assert manager.is_better({METRIC: 0.6} if rank == 0 else {"other": 1.0})
    with pytest.raises(
        ConfigError if rank == 0 else StoreError, match=f"{METRIC}.* (did you mean|there (is|are): .*other)"
    ):
        manager.is_better({"other": 1.0} if rank == 0 else {METRIC: 0.9})
    assert CheckpointManager(folder, "run").best_dir() == folder / "run-step1"
    asked_while_it_saves(rank, CheckpointManager(folder, "run", save_async=True))


def asked_while_it_saves(rank: int, manager: CheckpointManager) -> None:
    """Two threads of one rank must not talk at once: the ranks would mistake one's words for the other's."""
    write = checkpoint_manager.save_weights_and_rng
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_manager, "save_weights_and_rng", lambda *args: (time.sleep(0.5 * rank), write(*args)))
        manager.save(share_of(2, rank), 2)
        time.sleep(0.2)
        assert [manager.is_better({METRIC: score}) for score in (0.4, 0.6)] == [False, True]
        manager.save(share_of(3, rank), 3)
        time.sleep(0.2)
        assert manager.latest_dir() == manager.folder.final(3)


def test_rank_0_decides_what_is_better_also_while_a_checkpoint_is_written(tmp_path: Path):
    on_ranks(2, tmp_path, rank_0_decides, tmp_path / "output")
    for step in (1, 2, 3):
        assert_whole(tmp_path / "output" / f"run-step{step}")


def all_alike(rank: int) -> None:
    assert max_over_ranks(3 - rank) == 3
    assert broadcast_from_rank_0({"rank": rank}) == {"rank": 0}
    assert run_on_every_rank(lambda: rank) == rank
    for failing in (0, 1):
        own = rank == failing
        with pytest.raises(StoreError, match=f"^rank {failing}: OSError: disk on fire$"):
            run_on_every_rank(partial(_raise, OSError("disk on fire") if own else None))
        with pytest.raises(ConfigError if own else StoreError, match="wrong option"):
            run_on_every_rank(partial(_raise, ConfigError("wrong option") if own else None))
    assert max_over_ranks(rank) == 1


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_an_action_fails_on_every_rank_or_on_none(tmp_path: Path):
    on_ranks(2, tmp_path, all_alike)


def test_without_a_process_group_there_is_one_rank():
    assert max_over_ranks(3) == 3
    assert broadcast_from_rank_0("x") == "x"
    assert run_on_every_rank(lambda: "done") == "done"
    with pytest.raises(StoreError, match="^OSError: disk on fire$"):
        run_on_every_rank(partial(_raise, OSError("disk on fire")))
    with pytest.raises(ConfigError, match="wrong option"):
        run_on_every_rank(partial(_raise, ConfigError("wrong option")))
    with pytest.raises(ZeroDivisionError):
        run_on_every_rank(lambda: 1 / 0)
