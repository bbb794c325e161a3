"""What goes wrong on one rank is raised on all of them, and what rank 0 finds is what all believe."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import METRIC, assert_whole, break_phase, contents, limited_file_size, names, snapshot_of
from gloo_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from draftworks.distributed.collectives import broadcast_from_rank_0, max_over_ranks, run_on_every_rank
from draftworks.errors import ConfigError, StoreError
from draftworks.training import checkpoint_manager
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.snapshot import Snapshot

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
