"""Data-parallel ranks acknowledge a step in one transaction, and free afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataflow_toys import ids_of, toy_slim_ref
from gloo_ranks import on_ranks

from draftworks.dataflow.control_plane import ControlPlane, resolve_control_plane
from draftworks.dataflow.dp_ack import DPAckController
from draftworks.errors import StoreError

STEPS = 3


def open_plane(folder: Path) -> ControlPlane:
    return resolve_control_plane("disaggregated", "run", folder / "plane.db")


def samples_of(rank: int, step: int) -> list[str]:
    return [f"s{step}.{rank}.{place}" for place in range(2)]


def _train(rank: int, folder: Path, free_at: str) -> None:
    plane = open_plane(folder) if rank == 0 else resolve_control_plane("local_colocated", "run")
    plane = ControlPlane(plane.controller, True)
    freed: list[str] = []
    acks = DPAckController(plane, freed.extend, free_at)  # type: ignore[arg-type]
    for step in range(1, STEPS + 1):
        assert acks.ack_step(samples_of(rank, step), step) == 4
        if free_at == "ack":
            assert freed[-2:] == samples_of(rank, step)
        else:
            assert freed == []
    acks.record_checkpoint(2)
    assert freed[:4] == samples_of(rank, 1) + samples_of(rank, 2)
    assert acks.waiting_samples == (0 if free_at == "ack" else 2)
    for bad in (["unknown"] if rank == 0 else [], ["twice"]):
        before = list(freed)
        with pytest.raises(StoreError, match="unknown" if bad != ["twice"] else "twice"):
            acks.ack_step(bad, STEPS + 1)
        assert freed == before


@pytest.mark.parametrize("free_at", ["ack", "checkpoint"])
def test_ranks_acknowledge_in_one_transaction_and_fail_together(free_at: str, tmp_path: Path) -> None:
    controller = open_plane(tmp_path).controller
    every = [each for step in range(1, STEPS + 1) for rank in range(2) for each in samples_of(rank, step)]
    controller.commit_samples([toy_slim_ref(each) for each in [*every, "twice", "left"]])
    on_ranks(2, tmp_path, _train, tmp_path, free_at)
    assert ids_of(controller.iterate_refs(acked=True)) == every
    assert (controller.read_progress().acked_step, controller.read_progress().checkpoint_step) == (STEPS, 2)


def test_without_durable_acknowledgement_samples_are_freed_at_once() -> None:
    freed: list[str] = []
    acks = DPAckController(resolve_control_plane("local_colocated", "run"), freed.extend)
    assert acks.ack_step(["a", "b"], 1) == 2
    acks.record_checkpoint(1)
    assert freed == ["a", "b"]
