"""A consumer in arrival order on two ranks: stopped and resumed, it trains the steps of one rank."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from arrival_toys import HELD_OUT, SPEC, PackingStrategy, publish, put_samples
from gloo_ranks import on_ranks
from safetensors.torch import load_file, save_file
from training_toys import eval_loader
from waiting import HANG_S

from draftworks.distributed.collectives import get_rank, get_world_size
from draftworks.errors import ConfigError
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.stream.controller import DataFlowController
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.stream.topologies import TrainerParts, TrainerRuntime, build_disagg_online_consumer
from draftworks.training.backend import ensure_process_group
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.trainer import Persistence

PACKED = SPEC.model_copy(update={"pack_tokens": 24})


def build(folder: Path, stop_after: int | None = None, resume: bool = False) -> TrainerRuntime:
    """The signal that asks to stop comes to the last rank alone."""
    strategy, rank, world = PackingStrategy(), get_rank(), get_world_size()

    def stop_signal() -> int:
        steps = max((step for step, _ in strategy.seen), default=-1) + 1
        return signal.SIGTERM if rank == world - 1 and steps == stop_after else 0

    parts = TrainerParts(
        strategy=strategy,
        training=PACKED,
        heldout=eval_loader(strategy, HELD_OUT, 2, rank, world),
        device=torch.device("cpu"),
        persistence=Persistence(CheckpointManager(folder / "checkpoints", "toy"), {"strategy": "toy"}),
        stop_signal=stop_signal,
    )
    store, database = KeyedSharedDirStore(folder / "store"), folder / "control.sqlite"
    return build_disagg_online_consumer(parts, store, metadata_db_path=database, resume=resume, idle_timeout_s=HANG_S)


def _stop_and_resume(rank: int, folder: Path) -> None:
    stopped = build(folder, stop_after=3)
    stopped.run()
    assert (stopped.trainer.controller.stopped_by, stopped.trainer.controller.global_step) == (signal.SIGTERM, 3)
    with pytest.raises(ConfigError, match="has acknowledged 3 steps"):
        build(folder)
    again = build(folder, resume=True)
    history = again.run()
    assert history.steps == 6
    weights = again.trainer.weights()
    seen = [*stopped.trainer.strategy.seen, *again.trainer.strategy.seen]
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")


def prepare(folder: Path) -> Path:
    controller = DataFlowController("draft", SQLiteMetadataStore(folder / "control.sqlite"))
    publish(controller, put_samples(KeyedSharedDirStore(folder / "store")))
    return folder


def test_a_consumer_on_two_ranks_is_stopped_and_resumed(tmp_path: Path):
    folder = prepare(tmp_path / "two")
    on_ranks(2, tmp_path, _stop_and_resume, folder)
    with ensure_process_group(torch.device("cpu")):
        alone = build(prepare(tmp_path / "one"))
        alone.run()
        expected = alone.trainer.weights()
    seen = [tuple(each) for rank in range(2) for each in json.loads((folder / f"seen{rank}.json").read_text())]
    assert sorted(seen) == sorted(alone.trainer.strategy.seen)
    for name, tensor in load_file(folder / "weights.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    controller = DataFlowController("draft", SQLiteMetadataStore(folder / "control.sqlite"))
    assert (controller.read_progress().acked_step, controller.read_progress().checkpoint_step) == (6, 6)
    assert len(list(controller.iterate_refs(acked=True))) == 24
    assert KeyedSharedDirStore(folder / "store").health()["samples"] == 0
