"""A training on packed rows is the padded one: on any number of ranks, interrupted or not, evaluations included."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from resumable_runs import ResumableRun, assert_same_training, changed
from safetensors.torch import load_file, save_file
from test_training_eagle3 import SPEC as EAGLE3_SPEC
from test_training_eagle3 import assert_same, eagle3, ragged, target_parts
from test_training_trainer import batch_of, core_of
from training_toys import CountingStore, ToyStrategy

from draftworks.drafts.strategy import StepContext, StepOutput
from draftworks.errors import StoreError
from draftworks.features.contracts import TrainBatch
from draftworks.features.packed_schedule import PackedTrainSchedule
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.training.backend import SingleTrainingBackend, ensure_process_group
from draftworks.training.history import History
from draftworks.training.trainer import Trainer

BATCH, ALONE = 7, 5
"""No two samples fit into so few tokens: seven rows, so that one of two ranks is idle once in every step."""


def dflash() -> DFlashStrategy:
    options = DFlashOptions(block_size=4, num_layers=1, layer_ids=[2, 4, 5], num_anchors=5, gamma=3.0)
    return DFlashStrategy(options, target_parts(), None, seed=7)


STRATEGIES = {"eagle3": eagle3, "dflash": dflash}
TrainPadded = Callable[[str], Trainer]


def run_of(folder: Path, name: str, pack_tokens: int | None) -> ResumableRun:
    return ResumableRun(
        folder / f"{name}-{pack_tokens}",
        changed(EAGLE3_SPEC, global_batch_size=BATCH, save_every=1),
        micro=BATCH if pack_tokens is None else 1,
        strategy=STRATEGIES[name],
        train=ragged(19, seed=1),
        held_out=ragged(5, seed=2),
        pack_tokens=pack_tokens,
    )


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainPadded]:
    """Trains a strategy on padded rows, once; its weights are read in the process group in which it was trained."""
    with ensure_process_group(torch.device("cpu")):
        yield functools.cache(lambda name: run_of(tmp_path_factory.mktemp("padded"), name, None).finished())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("pack_tokens", [ALONE, 64, 1000])
def test_packed_training_is_the_padded_one(padded: TrainPadded, tmp_path: Path, name: str, pack_tokens: int) -> None:
    packed = run_of(tmp_path, name, pack_tokens).finished()
    assert_same(packed.weights(), packed.controller.history, padded(name))


def _packed_on_two(rank: int, folder: Path) -> None:
    for name in STRATEGIES:
        for pack_tokens in (ALONE, 64):
            run = run_of(folder, name, pack_tokens)
            trainer = run.finished(rank, world=2)
            weights = trainer.weights()
            if rank == 0:
                save_file(weights, run.folder / "weights.safetensors")
                trainer.controller.history.save(run.folder / "history.json")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    on_ranks(2, folder, _packed_on_two, folder)
    return folder


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("pack_tokens", [ALONE, 64])
def test_packed_training_on_two_ranks_is_the_padded_one(
    padded: TrainPadded, two_ranks: Path, name: str, pack_tokens: int
) -> None:
    found = run_of(two_ranks, name, pack_tokens).folder
    weights, history = load_file(found / "weights.safetensors"), History.load(found / "history.json")
    assert_same(weights, history, padded(name))


def test_one_of_these_two_ranks_is_idle_at_times() -> None:
    lengths = tuple(len(sample["input_ids"]) for sample in ragged(19, seed=1).values())
    common = {"samples": len(lengths), "lengths": lengths, "pack_tokens": ALONE, "global_batch_size": BATCH}
    ranks = [PackedTrainSchedule(**common, rank=rank, world=2, seed=3).batches(0) for rank in range(2)]
    assert {batch.padding for batches in ranks for batch in batches} == {False, True}


@pytest.mark.usefixtures("one_rank")
def test_stopped_and_killed_packed_training_goes_on_as_if_undisturbed(tmp_path: Path) -> None:
    straight = run_of(tmp_path / "straight", "eagle3", 64).finished()
    run = run_of(tmp_path / "broken", "eagle3", 64)
    run.trainer(stop_after=1).fit()
    with pytest.raises(StoreError, match="broke down"):  # within the third step
        run.trainer(store=CountingStore(run.train, limit=BATCH + 3)).fit()
    assert_same_training(run.finished(), straight)


@pytest.mark.usefixtures("one_rank")
def test_padded_training_goes_on_packed(padded: TrainPadded, tmp_path: Path) -> None:
    begun = run_of(tmp_path, "eagle3", None)
    begun.trainer(stop_after=3).fit()
    packed = replace(begun, pack_tokens=64).finished()
    assert [session.start_step for session in packed.controller.history.sessions] == [0, 3]
    assert_same(packed.weights(), packed.controller.history, padded("eagle3"))


class PerBatch(ToyStrategy):
    """Weighs every batch alike, whatever is in it."""

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        return replace(super().forward_loss(batch, ctx), loss_weight=torch.ones(()))


@pytest.mark.usefixtures("one_rank")
def test_an_idle_batch_adds_nothing_to_a_step() -> None:
    strategy = PerBatch()
    core = core_of(strategy, SingleTrainingBackend(torch.device("cpu")))
    idle = replace(batch_of(strategy, supervised=False), sample_ids=())
    assert core.train_step(replace(idle, ends_step=False), StepContext(training=True)) is None
    totals = core.train_step(batch_of(strategy), StepContext(training=True)).totals
    assert totals.loss_weight == 1
    assert totals.tokens == batch_of(strategy).num_tokens
