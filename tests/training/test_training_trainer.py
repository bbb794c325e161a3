"""The trainer: what it computes does not depend on how the global batch is cut up.
Clipping, and steps that must not be made.
Shapes of the learning-rate schedules.
Where a checkpoint stands counts samples of the population, since that decides the order of training.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_toys import ToyStrategy, eval_loader, ragged_samples, train_loader

from draftworks.config.registry_files import TrainingSpec
from draftworks.drafts.strategy import StepContext, StepOutput
from draftworks.errors import StoreError, TrainingError
from draftworks.features.contracts import TrainBatch
from draftworks.training.backend import SingleTrainingBackend, TrainingBackend, ensure_process_group
from draftworks.training.fsdp_backend import FSDPTrainingBackend
from draftworks.training.history import History
from draftworks.training.optimizer import BF16Optimizer, LrSchedule, ScheduleName, TrainerCore
from draftworks.training.resume import TrainingProgress
from draftworks.training.trainer import Trainer, make_plan

CPU = torch.device("cpu")
GLOBAL = 8
SPEC = TrainingSpec(
    global_batch_size=GLOBAL, epochs=3, lr=0.02, compute_dtype="float32", log_every=1, eval_every=5, warmup_ratio=0.1
)


def trained(micro: int, rank: int = 0, world: int = 1, spec: TrainingSpec = SPEC, samples: int = 45) -> Trainer:
    strategy = ToyStrategy()
    train, held_out = ragged_samples(samples), ragged_samples(7, seed=2)
    trainer = Trainer(
        strategy,
        train_loader(strategy, train, micro, GLOBAL, rank, world),
        eval_loader(strategy, held_out, 2, rank, world),
        spec,
        CPU,
    )
    trainer.fit()
    return trainer


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def assert_same_history(found: History, expected: History) -> None:
    assert found.total_steps == expected.total_steps
    for mine, theirs in zip(found.train, expected.train, strict=True):
        assert (mine.step, mine.tokens, mine.lr) == (theirs.step, theirs.tokens, theirs.lr)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for mine, theirs in zip(found.evals, expected.evals, strict=True):
        assert mine.step == theirs.step
        assert mine.result.metric_sums == theirs.result.metric_sums
        assert mine.result.avg_loss == pytest.approx(theirs.result.avg_loss, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.usefixtures("one_rank")
def test_micro_batch_size_changes_nothing(micro: int) -> None:
    whole, cut = trained(GLOBAL), trained(micro)
    assert_same_weights(cut.weights(), whole.weights())
    assert_same_history(cut.controller.history, whole.controller.history)


def _train_and_save(rank: int, folder: Path) -> None:
    trainer = trained(micro=2, rank=rank, world=2)
    weights = trainer.weights()
    assert bool(weights) == (rank == 0)
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
        trainer.controller.history.save(folder / "history.json")


def test_two_ranks_equal_one(tmp_path: Path, one_rank: None) -> None:
    on_ranks(2, tmp_path, _train_and_save, tmp_path)
    alone = trained(micro=2)
    assert_same_weights(load_file(tmp_path / "weights.safetensors"), alone.weights())
    assert_same_history(History.load(tmp_path / "history.json"), alone.controller.history)


@pytest.mark.usefixtures("one_rank")
def test_loss_and_gradient_of_a_window_are_those_of_its_mean_over_supervised_tokens() -> None:
    strategy, samples = ToyStrategy(), ragged_samples(GLOBAL)
    output = strategy.forward_loss(strategy.collate(list(samples.values()), list(samples)), StepContext(training=True))
    loss = output.loss_sum / output.loss_weight
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in strategy.model.parameters()])
    trainer = trained(micro=1, spec=SPEC.model_copy(update={"epochs": 1.0}), samples=GLOBAL)
    first = trainer.controller.history.train[0]
    assert first.loss == pytest.approx(loss.item(), rel=1e-6)
    assert first.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_loss_falls_and_history_says_so() -> None:
    spec = SPEC.model_copy(update={"epochs": 20.0, "schedule": "constant"})
    history = trained(micro=4, spec=spec).controller.history
    assert history.steps == history.total_steps == 20 * (45 // GLOBAL)
    assert history.last_loss() < 0.5 * history.first_loss()
    assert history.evals[-1].result.avg_acc > history.evals[0].result.avg_acc
    assert history.evals[-1].step == history.steps
    assert history.tokens_per_s > 0


@pytest.mark.usefixtures("one_rank")
def test_fit_again_trains_nothing() -> None:
    trainer = trained(micro=4)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    points = len(trainer.controller.history.train)
    assert len(trainer.fit().train) == points
    assert_same_weights(trainer.weights(), before)


class _Recording(ToyStrategy):
    """Remembers which samples it was trained on, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        if ctx.training:
            self.seen += batch.sample_ids
        return super().forward_loss(batch, ctx)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("steps_done", [0, 3, 7])
def test_epochs_have_their_own_order_and_steps_done_are_skipped(steps_done: int) -> None:
    strategy = _Recording()
    loader = train_loader(strategy, ragged_samples(45), 4, GLOBAL)
    trainer = Trainer(strategy, loader, eval_loader(strategy, ragged_samples(2), 2), SPEC, CPU)
    trainer.controller.position = replace(trainer.controller.position, global_step=steps_done)
    trainer.fit()
    order = [index for epoch in range(3) for batch in loader.schedule.batches(epoch) for index in batch.indices]
    assert strategy.seen == [f"s{index}" for index in order[steps_done * GLOBAL :]]


@pytest.mark.usefixtures("group_of_one")
def test_bf16_compute_keeps_fp32_masters() -> None:
    trainer = trained(micro=4, spec=SPEC.model_copy(update={"compute_dtype": "bfloat16"}))
    weights = trainer.weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())


def test_a_process_alone_trains_as_fsdp_does(one_rank: None) -> None:
    """In fp32: micro-batches, clipping, decay and evaluations."""
    alone = trained(micro=2)
    with ensure_process_group(CPU):
        sharded = trained(micro=2)
        weights = sharded.weights()
    assert isinstance(sharded.backend, FSDPTrainingBackend)
    assert isinstance(alone.backend, SingleTrainingBackend)
    assert [point.loss for point in alone.controller.history.train] == pytest.approx(
        [point.loss for point in sharded.controller.history.train], rel=1e-6
    )
    for name, tensor in weights.items():
        torch.testing.assert_close(alone.weights()[name], tensor, rtol=1e-6, atol=1e-7)


def test_bf16_without_a_process_group_is_no_silent_fp32(one_rank: None) -> None:
    with pytest.raises(RuntimeError, match="bfloat16 needs a process group"):
        trained(micro=4, spec=SPEC.model_copy(update={"compute_dtype": "bfloat16"}))


@pytest.fixture(params=[SingleTrainingBackend, FSDPTrainingBackend])
def backend(request: pytest.FixtureRequest, group_of_one: None) -> TrainingBackend:
    return request.param(CPU)


def core_of(strategy: ToyStrategy, backend: TrainingBackend) -> TrainerCore:
    backend.prepare_model(strategy)
    optimizer = BF16Optimizer(backend.parameters(), LrSchedule(0.1, 10), weight_decay=0.1)
    return TrainerCore(strategy, backend, optimizer)


def batch_of(strategy: ToyStrategy, supervised: bool = True, seed: int = 1) -> TrainBatch:
    samples = ragged_samples(3, seed=seed, supervised=supervised)
    return strategy.collate(list(samples.values()), list(samples))


def test_window_without_supervision_leaves_the_weights_alone(backend: TrainingBackend) -> None:
    strategy = ToyStrategy()
    core = core_of(strategy, backend)
    core.train_step(batch_of(strategy), StepContext(training=True))
    before = core.backend.full_state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    result = core.train_step(batch_of(strategy, supervised=False), StepContext(training=True))
    assert result.totals.avg_loss is None
    assert result.grad_norm == 0.0
    for name, tensor in core.backend.full_state_dict().items():
        assert torch.equal(tensor, before[name])


def test_nan_loss_stops_training_and_names_the_samples(backend: TrainingBackend) -> None:
    strategy = ToyStrategy(break_at=2)
    core = core_of(strategy, backend)
    for step in range(2):
        core.train_step(batch_of(strategy), StepContext(step, training=True))
    before = {name: tensor.clone() for name, tensor in core.backend.full_state_dict().items()}
    with pytest.raises(TrainingError, match=r"optimizer step 2 is nan.*s0, s1, s2"):
        core.train_step(batch_of(strategy), StepContext(2, training=True))
    assert_same_weights(core.backend.full_state_dict(), before)


def test_plan_counts_optimizer_steps() -> None:
    assert make_plan(SPEC, steps_per_epoch=10).total_steps == 30
    assert make_plan(SPEC.model_copy(update={"max_steps": 7}), 10).total_steps == 7
    assert make_plan(SPEC.model_copy(update={"max_steps": 70}), 10).total_steps == 30
    assert make_plan(SPEC.model_copy(update={"epochs": 0.01}), 10).total_steps == 1
    assert make_plan(SPEC.model_copy(update={"epochs": 0.5}), 10).total_steps == 5


@pytest.mark.usefixtures("one_rank")
def test_history_round_trip(tmp_path: Path) -> None:
    history = trained(micro=4).controller.history
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history
    assert all(math.isfinite(point.loss) for point in history.train)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("log_every", "expected"), [(50, [1, 15]), (7, [1, 7, 14, 15]), (1, list(range(1, 16)))])
def test_first_and_last_step_are_always_recorded(log_every: int, expected: list[int]) -> None:
    history = trained(micro=4, spec=SPEC.model_copy(update={"log_every": log_every})).controller.history
    assert [point.step for point in history.train] == expected
    assert history.tokens == trained(micro=4).controller.history.tokens


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("supervised", [True, False])
def test_whether_there_is_anything_to_evaluate_is_known_before_training(supervised: bool) -> None:
    strategy = ToyStrategy()
    held_out = ragged_samples(5, supervised=supervised)
    trainer = Trainer(
        strategy, train_loader(strategy, ragged_samples(9), 4, GLOBAL), eval_loader(strategy, held_out, 2), SPEC, CPU
    )
    assert trainer.can_evaluate() == supervised


class WatchedStrategy(ToyStrategy):
    """Writes down the contexts of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[StepContext] = []

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        self.contexts.append(ctx)
        return super().forward_loss(batch, ctx)


def test_a_pass_knows_whether_it_trains_and_at_which_step(one_rank: None) -> None:
    """Anchors are drawn by it, and figures that only evaluations need are computed by it."""
    strategy = WatchedStrategy()
    loader = train_loader(strategy, ragged_samples(16), GLOBAL, GLOBAL)
    held_out = eval_loader(strategy, ragged_samples(2, seed=2), 2)
    history = Trainer(strategy, loader, held_out, SPEC.model_copy(update={"eval_every": 2}), CPU).fit()
    steps = [ctx.global_step for ctx in strategy.contexts if ctx.training]
    assert steps == list(range(history.total_steps))
    assert {ctx.total_steps for ctx in strategy.contexts if ctx.training} == {history.total_steps}
    assert len(strategy.contexts) - len(steps) == len(history.evals) > 0


def parameter_with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def named(*parameters: nn.Parameter) -> dict[str, nn.Parameter]:
    return {f"p{index}": parameter for index, parameter in enumerate(parameters)}


def test_step_reports_the_norm_before_clipping_and_the_rate_used() -> None:
    parameters = [parameter_with_gradient(3.0), parameter_with_gradient(4.0)]
    optimizer = BF16Optimizer(named(*parameters), LrSchedule(0.1, 10, warmup_ratio=0.2), max_grad_norm=1.0)
    done = optimizer.step()
    assert done.grad_norm == pytest.approx(5.0)
    assert done.lr == pytest.approx(0.05)
    assert optimizer.lr == pytest.approx(0.1)
    assert parameters[0].grad is None


def test_clipping_keeps_the_direction() -> None:
    """Plain AdamW divides the scale out, so its first moment is looked at."""
    parameter = parameter_with_gradient(3.0, 4.0)
    optimizer = BF16Optimizer(named(parameter), LrSchedule(0.1, 10), max_grad_norm=0.5)
    optimizer.step()
    moment = optimizer.moments()["p0.exp_avg"] / 0.1
    torch.testing.assert_close(moment, torch.tensor([0.3, 0.4]), rtol=1e-4, atol=0)


def test_weights_are_bit_for_bit_those_of_torchs_adamw() -> None:
    """With weight decay, another rate at each step, and a parameter that has a gradient at every other step only."""
    generator = torch.Generator().manual_seed(3)
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, n)) for n in (7, 4)] for _ in range(2))
    schedule = LrSchedule(0.1, 6)
    optimizer = BF16Optimizer(named(*ours), schedule, weight_decay=0.3, max_grad_norm=1e9)
    reference = torch.optim.AdamW(theirs, weight_decay=0.3, fused=True)
    for step in range(6):
        for mine, other in zip(ours[: 2 - step % 2], theirs, strict=False):
            other.grad = torch.randn(mine.shape, generator=generator)
            mine.grad = other.grad.clone()
        reference.param_groups[0]["lr"] = schedule.lr(step)
        reference.step()
        reference.zero_grad()
        optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert optimizer.counters().updates == {"p0": 6, "p1": 3}


def test_gradient_that_is_not_finite_is_refused_before_the_step() -> None:
    parameter = parameter_with_gradient(float("inf"), 1.0)
    optimizer = BF16Optimizer(named(parameter), LrSchedule(0.1, 10))
    with pytest.raises(TrainingError, match="optimizer step 0 has norm inf"):
        optimizer.step()
    assert torch.equal(parameter, torch.zeros(2))


def test_skipped_step_moves_the_schedule_and_not_the_weights() -> None:
    parameter = parameter_with_gradient(1.0, 1.0)
    optimizer = BF16Optimizer(named(parameter), LrSchedule(0.1, 10, warmup_ratio=0.2), weight_decay=0.5)
    assert optimizer.skip().lr == pytest.approx(0.05)
    assert optimizer.lr == pytest.approx(0.1)
    assert parameter.grad is None
    assert torch.equal(parameter, torch.zeros(2))


def rates(name: ScheduleName, total: int, steps: range | tuple[int, ...], **options: float) -> list[float]:
    schedule = LrSchedule(1.0, total, name, **options)
    return [round(schedule.lr(step), 4) for step in steps]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert rates("constant", 100, range(7), warmup_ratio=0.05) == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]


def test_golden_schedules() -> None:
    steps = (0, 1, 2, 4, 6, 10)
    assert rates("cosine", 10, steps, warmup_ratio=0.2) == [0.5, 1.0, 1.0, 0.8536, 0.5, 0.0]
    assert rates("linear", 10, steps, warmup_ratio=0.2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.0]
    assert rates("wsd", 10, range(11), warmup_ratio=0.2, decay_ratio=0.4) == [
        0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0,
    ]  # fmt: skip


def test_floor_is_where_a_decay_ends() -> None:
    for name in ("cosine", "linear", "wsd"):
        assert rates(name, 10, (10, 50), floor=0.1) == [0.1, 0.1]
    assert rates("linear", 10, (5,), warmup_ratio=0.0, floor=0.2) == [0.6]


def test_wsd_is_stable_until_its_decay_however_long_the_warm_up() -> None:
    assert rates("wsd", 10, range(8, 11), warmup_ratio=0.9, decay_ratio=0.5) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("peak", [1e-4, 3.0])
def test_peak_scales_everything(peak: float) -> None:
    assert LrSchedule(peak, 10).lr(5) == pytest.approx(peak * LrSchedule(1.0, 10).lr(5))


@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.integers(1, 500),
    st.floats(0, 0.9),
    st.floats(0.01, 1.0),
    st.floats(0, 1),
)
def test_rate_stays_positive_and_never_rises_after_warm_up(
    name: ScheduleName, total: int, warmup: float, decay: float, floor: float
) -> None:
    schedule = LrSchedule(1.0, total, name, warmup, decay, floor)
    values = [schedule.lr(step) for step in range(total)]
    after = values[int(warmup * total) :]
    assert all(0 < value <= 1 + 1e-9 for value in values)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(after, after[1:]))
    assert schedule.lr(10 * total) == pytest.approx(1.0 if name == "constant" else floor)


HERE = Path("checkpoint")


def test_a_checkpoint_of_a_complete_set_is_read_by_a_training_that_leaves_samples_out_of_it():
    stored = TrainingProgress(13, 4, global_step=2).to_json()
    assert stored == {"global_step": 2, "epoch": 0, "epoch_samples": 8, "samples": 13, "global_batch_size": 4}
    assert TrainingProgress(12, 4, left_out=1).from_json(stored, HERE).global_step == 2


@pytest.mark.parametrize(
    "other", [TrainingProgress(12, 4), TrainingProgress(13, 4, left_out=1), TrainingProgress(11, 4, left_out=2)]
)
def test_a_checkpoint_of_another_order_is_refused(other: TrainingProgress):
    stored = TrainingProgress(13, 4, global_step=3).to_json()
    with pytest.raises(StoreError, match="would repeat or skip samples"):
        other.from_json(stored, HERE)
