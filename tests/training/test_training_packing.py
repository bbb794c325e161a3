"""A training on packed rows is the padded one: on any number of ranks, interrupted or not, evaluations included.
Compiled blocks: the same weights to rounding, and where nothing can be compiled a training that says so and goes on.
Training ends when evaluations have not been better for too long, and stays ended.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from pydantic import ValidationError
from resumable_runs import STEPS, ResumableRun, assert_same_training, changed
from safetensors.torch import load_file, save_file
from test_training_eagle3 import SPEC as EAGLE3_SPEC
from test_training_eagle3 import assert_same, eagle3, ragged, target_parts
from test_training_trainer import batch_of, core_of
from training_toys import HIDDEN, CountingStore, ToyStrategy, eval_loader, ragged_samples, train_loader

from draftworks.config.registry_files import TrainingSpec
from draftworks.drafts.strategy import StepContext, StepOutput
from draftworks.errors import StoreError
from draftworks.features.contracts import TrainBatch
from draftworks.features.schedule import PackedTrainSchedule
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.training.backend import SingleTrainingBackend, ensure_process_group
from draftworks.training.history import History
from draftworks.training.trainer import Trainer, compile_blocks

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


CPU = torch.device("cpu")
SPEC = TrainingSpec(global_batch_size=4, max_steps=3, lr=0.02, compute_dtype="float32")


def trained_as(spec: TrainingSpec) -> dict[str, torch.Tensor]:
    strategy, samples = ToyStrategy(), ragged_samples(12)
    trainer = Trainer(strategy, train_loader(strategy, samples, 4, 4), eval_loader(strategy, samples, 4), spec, CPU)
    trainer.fit()
    return trainer.weights()


def no_compiler(*_args, **_kwargs):
    raise RuntimeError("no compiler for you\nand a long trace")


@pytest.mark.usefixtures("one_rank")
def test_compiled_trains_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_function = [], torch.compile

    def traced(function, **_options):
        """All of torch.compile but the compiler, which takes its time; tests/gpu has it do its work."""
        compiled.append(function)
        return compile_function(function, backend="aot_eager")

    expected = trained_as(SPEC)
    monkeypatch.setattr(torch, "compile", traced)
    found = trained_as(SPEC.model_copy(update={"compile": True}))
    assert [function.__name__ for function in compiled] == ["<lambda>", "forward"]
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_without_a_compiler_the_training_says_so_and_goes_on(monkeypatch, caplog) -> None:
    expected = trained_as(SPEC)
    monkeypatch.setattr(torch, "compile", no_compiler)
    with caplog.at_level(logging.WARNING):
        found = trained_as(SPEC.model_copy(update={"compile": True}))
    assert "training.compile: torch.compile does not work here on cpu" in caplog.text
    assert "RuntimeError: no compiler for you. Install" in caplog.text
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def test_a_compiler_with_wrong_gradients_is_not_used(caplog) -> None:
    def halves(graph, _inputs):
        return lambda *inputs: tuple(output / 2 for output in graph(*inputs))

    strategy = ToyStrategy()
    with caplog.at_level(logging.WARNING):
        assert not compile_blocks(strategy, CPU, backend=halves)
    assert f"torch {torch.__version__} compiles a small block whose gradient is 0.07148, not 0.2859" in caplog.text
    assert strategy.model.block.forward == type(strategy.model.block).forward.__get__(strategy.model.block)


def test_what_is_compiled_is_training_and_no_evaluation() -> None:
    graphs = []

    def recorded(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    block = (strategy := ToyStrategy()).model.block
    states, plain = torch.randn(2, HIDDEN), block.forward
    assert compile_blocks(strategy, CPU, backend=recorded)
    graphs.clear()
    with torch.no_grad():
        assert torch.equal(block(states), plain(states))
    assert not graphs
    assert torch.equal(block(states), plain(states))
    assert len(graphs) == 1


def test_whether_blocks_are_compiled_does_not_identify_a_training() -> None:
    assert SPEC.to_identity() == SPEC.model_copy(update={"compile": True}).to_identity()


# The loss falls from one evaluation to the next, but after a while by less than this.
STALLING = {"best_metric": "eval/avg_loss", "best_mode": "min", "best_min_delta": 0.06, "eval_every": 1, "lr": 0.02}


def expected_end(undisturbed: Trainer, spec: TrainingSpec) -> int:
    """The step after which a training ends, told from all evaluations of one without patience."""
    best, worse = float("inf"), 0
    for point in undisturbed.controller.history.evals:
        better = best - point.result.avg_loss > spec.best_min_delta
        best, worse = (point.result.avg_loss, 0) if better else (best, worse + 1)
        if worse == spec.patience:
            return point.step
    return STEPS


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_ends_training_at_the_first_evaluation_that_exhausts_it(tmp_path: Path, patience: int) -> None:
    spec = changed(**STALLING, patience=patience)
    whole = ResumableRun(tmp_path / "whole", changed(**STALLING)).finished()
    early = ResumableRun(tmp_path / "early", spec).finished()
    end = expected_end(whole, spec)
    assert patience + 1 < end < STEPS
    assert early.controller.global_step == early.controller.history.steps == end
    assert early.controller.ended_early
    assert not whole.controller.ended_early
    assert early.persistence.manager.best.step < end


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("save_every", [0, 4, 3], ids=["never", "off the cadence", "on the cadence"])
def test_resume_of_a_training_that_ended_early_trains_nothing(tmp_path: Path, save_every: int) -> None:
    """It ends after step 6: the first evaluation is the best, since no other can be so much better."""
    spec = changed(eval_every=2, best_min_delta=100.0, patience=2, save_every=save_every)
    run = ResumableRun(tmp_path, spec)
    ended = run.finished()
    assert (ended.controller.history.steps, run.manager().steps()[-1]) == (6, 6)
    for _ in range(2):
        store = CountingStore(run.train)
        again = run.trainer(store=store)
        again.fit()
        assert store.reads == 0
        assert again.controller.ended_early
        assert_same_training(again, ended)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stop_after", [1, 3, 4, 5])
def test_patience_counts_on_over_an_interruption(tmp_path: Path, stop_after: int) -> None:
    spec = changed(eval_every=2, best_min_delta=100.0, patience=2, save_every=0)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "stopped", spec)
    run.trainer(stop_after=stop_after).fit()
    assert_same_training(run.finished(), straight)


@pytest.mark.usefixtures("one_rank")
def test_end_that_an_evaluation_was_cut_off_from_is_found_on_resume(tmp_path: Path) -> None:
    spec = changed(eval_every=2, best_min_delta=100.0, patience=2, save_every=3)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "cut", spec)
    within_the_third = 2 * len(run.held_out) + 3
    with pytest.raises(StoreError, match="broke down"):
        run.trainer(held_out_store=CountingStore(run.held_out, limit=within_the_third)).fit()
    assert_same_training(run.finished(), straight)


def test_patience_without_evaluations_is_refused() -> None:
    with pytest.raises(ValidationError, match="patience 3 counts evaluations, but eval_every is 0"):
        TrainingSpec(patience=3)
