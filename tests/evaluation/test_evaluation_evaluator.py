"""The evaluator adds up before it divides, and runs the same collectives on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from draftworks.drafts.strategy import StepContext, StepOutput
from draftworks.errors import DataError
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.result import EvalResult, find_metric
from draftworks.features.contracts import TrainBatch


def batch(loss: float, corrects: list[float], denoms: list[float], ids: tuple[str, ...] = ("s",)) -> TrainBatch:
    """Return a batch that carries its own result."""
    tensors = {"loss": torch.tensor(loss), "corrects": torch.tensor(corrects), "denoms": torch.tensor(denoms)}
    return TrainBatch(tensors, ids, num_tokens=10)


def forward(batch: TrainBatch, ctx: StepContext) -> StepOutput:
    counts = {"acc_corrects": batch["corrects"], "acc_denoms": batch["denoms"]}
    return StepOutput(batch["loss"], batch["denoms"][0], counts)


def test_golden_values() -> None:
    result = Evaluator().run(forward, [batch(6.0, [3, 1], [4, 2]), batch(2.0, [1, 1], [4, 2])])
    assert result.avg_loss == 8.0 / 8
    assert result.per_position_acc == (0.5, 0.5)
    assert result.avg_acc == 0.5
    assert result.simulated_acc_len == 0.5 + 0.25
    assert result.supervised_tokens == 8
    assert result.tokens == 20
    assert result.metrics() == {
        "eval/avg_acc": 0.5,
        "eval/per_position_acc": [0.5, 0.5],
        "eval/simulated_acc_len": 0.75,
        "eval/supervised_tokens": 8,
        "eval/avg_loss": 1.0,
    }


def test_counts_are_summed_before_any_ratio() -> None:
    small_and_perfect, large_and_poor = batch(0.0, [1.0], [1.0]), batch(0.0, [0.0], [99.0])
    assert Evaluator().run(forward, [small_and_perfect, large_and_poor]).avg_acc == 0.01


def test_per_position_losses_and_acceptance_rates_are_reported_if_counted() -> None:
    counts = {
        "acc_corrects": (1.0,),
        "acc_denoms": (2.0,),
        "loss_sums": (6.0,),
        "loss_denoms": (2.0,),
        "acceptance_sums": (1.0,),
        "acceptance_denoms": (4.0,),
    }
    metrics = EvalResult(1.0, 2.0, 5, counts).metrics()
    assert metrics["eval/ploss_0"] == 3.0
    assert metrics["eval/acceptance_rate_0"] == 0.25


def test_of_a_reduced_vocabulary_the_acceptance_rate_says_over_which_positions_it_is() -> None:
    counts = {
        "acc_corrects": (2.0,),
        "acc_denoms": (8.0,),
        **{"acceptance_sums": (3.0,), "acceptance_denoms": (4.0,)},
        **{"unconditional_acceptance_sums": (4.0,), "unconditional_acceptance_denoms": (8.0,)},
    }
    metrics = EvalResult(1.0, 2.0, 5, counts).metrics()
    rates = {name: value for name, value in metrics.items() if "acceptance" in name}
    assert rates == {"eval/conditional_acceptance_rate_0": 0.75, "eval/unconditional_acceptance_rate_0": 0.5}
    assert find_metric(metrics, "eval/acceptance_rate_0") == 0.75  # as a `best_metric` may still be called
    assert find_metric({"eval/acceptance_rate_0": 0.5}, "eval/acceptance_rate_0") == 0.5
    assert find_metric(metrics, "eval/acceptance_rate_9") is None


def test_what_only_the_strategy_counts_is_reported_under_its_own_name() -> None:
    counts = {
        "acc_denoms": (4.0,),
        "accept_len_sums": (6.0,),
        "accept_len_denoms": (4.0,),
        "confidence_error_sums": (1.0, 0.5),
        "confidence_error_denoms": (4.0, 2.0),
        "without_denoms_sums": (1.0,),
    }
    metrics = EvalResult(1.0, 2.0, 5, counts).metrics()
    assert metrics["eval/accept_len"] == 1.5
    assert metrics["eval/confidence_error"] == [0.25, 0.25]
    assert "eval/without_denoms" not in metrics


def test_no_batches_is_no_result() -> None:
    assert Evaluator().run(forward, []) is None


def test_no_supervised_token_is_no_result() -> None:
    assert Evaluator().run(forward, [batch(0.0, [0.0], [0.0])]) is None


def test_padding_batches_are_run_and_not_counted() -> None:
    seen = []

    def watched(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        seen.append(batch)
        return forward(batch, ctx)

    result = Evaluator().run(watched, [batch(1.0, [1.0], [2.0]), batch(5.0, [5.0], [5.0], ids=())])
    assert len(seen) == 2
    assert result.supervised_tokens == 2


def test_draft_without_loss_has_no_loss_metric() -> None:
    def lossless(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        return StepOutput(torch.zeros(()), torch.zeros(()), forward(batch, ctx).metric_sums)

    result = Evaluator().run(lossless, [batch(1.0, [1.0], [2.0])])
    assert result.avg_loss is None
    assert "eval/avg_loss" not in result.metrics()


def test_loss_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(DataError, match="loss over 2 evaluated tokens is nan"):
        Evaluator().run(forward, [batch(float("nan"), [1.0], [2.0])])


def test_no_gradient_is_recorded() -> None:
    weight = torch.ones((), requires_grad=True)
    outputs = []

    def with_weight(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        output = forward(batch, ctx)
        outputs.append(output.loss_sum * weight)
        return output

    Evaluator().run(with_weight, [batch(1.0, [1.0], [2.0])])
    assert not outputs[0].requires_grad


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8))
def test_simulated_acc_len_is_a_sum_of_products_within_its_bounds(pairs: list[tuple[int, int]]) -> None:
    corrects = tuple(float(min(pair)) for pair in pairs)
    denoms = tuple(float(max(pair)) for pair in pairs)
    result = EvalResult(0.0, 1.0, 1, {"acc_corrects": corrects, "acc_denoms": denoms})
    accuracies = torch.tensor(result.per_position_acc, dtype=torch.float64)
    assert result.simulated_acc_len == pytest.approx(accuracies.cumprod(0).sum().item())
    assert 0 <= result.simulated_acc_len <= len(pairs)


def test_results_add_up_and_survive_json() -> None:
    first = Evaluator().run(forward, [batch(6.0, [3, 1], [4, 2])])
    second = Evaluator().run(forward, [batch(2.0, [1, 1], [4, 2])])
    both = Evaluator().run(forward, [batch(6.0, [3, 1], [4, 2]), batch(2.0, [1, 1], [4, 2])])
    assert first + second == both == both + EvalResult.empty()
    assert EvalResult.from_json(json.loads(json.dumps(both.to_json()))) == both


def _with_unequal_shares(rank: int) -> None:
    everything = [batch(6.0, [3, 1], [4, 2]), batch(2.0, [1, 1], [4, 2])]
    expected = EvalResult(8.0, 8.0, 20, {"acc_corrects": (4.0, 2.0), "acc_denoms": (8.0, 4.0)})
    assert Evaluator().run(forward, everything[rank : rank + 1]) == expected
    assert Evaluator().run(forward, everything if rank == 1 else []) == expected
    assert Evaluator().run(forward, []) is None


def test_ranks_with_unequal_and_empty_shares_agree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _with_unequal_shares)


def test_sums_over_fewer_draft_positions_add_nothing_to_the_others() -> None:
    two, three = (EvalResult(1.0, 1.0, 1, {"acc_corrects": (1.0,) * n}) for n in (2, 3))
    assert (two + three).correct == (three + two).correct == (2.0, 2.0, 1.0)
    assert (EvalResult.empty() + two).correct == two.correct
