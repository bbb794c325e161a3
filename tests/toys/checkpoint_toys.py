"""Small snapshots, what a checkpoint holds, and saves that break down in the middle."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.storage import files
from draftworks.training import checkpoint_manager
from draftworks.training.checkpoint_files import RECORD, read_record, verify
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.snapshot import RNG, WEIGHTS, Snapshot, load_moments, restore_rng

METRIC = "eval/simulated_acc_len"
PHASES = (
    "save_weights_and_rng",
    "save_moments",
    "publish_json",
    "sync_and_checksum",
    "write_record",
    "fsync_tree",
    "rename",
)


def snapshot_of(step: int, moments: dict[str, Tensor] | None = None) -> Snapshot:
    """Every tensor and number in it tells the step."""
    weights = {"w": torch.full((5, 3), float(step)), "transposed": torch.arange(6.0).reshape(2, 3).T + step}
    rng = {"cpu": torch.Generator().manual_seed(step).get_state()}
    moments = {"w.exp_avg": torch.full((5, 3), step + 0.5)} if moments is None else moments
    return Snapshot({"position": step}, weights, moments, rng, {"history.json": {"steps": step}})


def save_steps(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(snapshot_of(step), step)


def save_best(manager: CheckpointManager, step: int, score: float) -> None:
    save_steps(manager, step)
    manager.update_best(step, {METRIC: score})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_whole(folder: Path) -> None:
    record = read_record(folder)
    verify(folder, record, record.files)
    assert record.files.keys() | {RECORD} == contents(folder).keys()


def assert_holds(folder: Path, snapshot: Snapshot) -> None:
    """All of it, read back by the means of a resume."""
    assert_whole(folder)
    assert read_record(folder).state == snapshot.state
    assert {name: json.loads((folder / name).read_text()) for name in snapshot.documents} == snapshot.documents
    moments = {name: torch.full_like(moment, float("nan")) for name, moment in snapshot.moments.items()}
    load_moments(folder, moments)
    assert_equal(load_file(folder / WEIGHTS), snapshot.weights)
    assert_equal(moments, snapshot.moments)
    restore_rng(folder / RNG / "rank0.safetensors", torch.device("cpu"))
    assert_equal({"cpu": torch.get_rng_state()}, snapshot.rng)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same tensors, to the bit."""
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


@contextmanager
def limited_file_size(limit: int) -> Iterator[None]:
    """The operating system refuses this process to write larger files: a full disk that needs no disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def break_phase(monkeypatch: pytest.MonkeyPatch, phase: str, error: BaseException) -> None:
    """The next save raises when it comes to this phase."""
    if phase == "rename":
        break_renames(
            monkeypatch, error, lambda target: "-step" in target.name and not target.name.endswith(".partial")
        )
        return
    if phase == "save_moments" and isinstance(error, OSError):  # it names the rank itself
        error = StoreError(f"rank 0: {error}")
    module = files if phase == "fsync_tree" else checkpoint_manager
    monkeypatch.setattr(module, phase, _raising(error))


def break_renames(monkeypatch: pytest.MonkeyPatch, error: BaseException, chosen: Callable[[Path], bool]) -> None:
    rename = files.os.replace

    def breaking(source: Path, target: Path) -> None:
        if chosen(Path(target)):
            raise error
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", breaking)


def _raising(error: BaseException) -> Callable[..., Any]:
    def action(*args: Any, **more: Any) -> None:
        raise error

    return action
