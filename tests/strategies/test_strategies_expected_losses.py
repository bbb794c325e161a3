"""Losses, counts and gradients of every strategy and option are those that expected_losses.json holds.

The file was made by hand-derived gradients, before losses were written as formulas. To make it again after a change that is
meant:

    PYTHONPATH=tests/toys python tests/strategies/test_strategies_expected_losses.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import cover, gate_or_long
from objective_toys import Case, batch_of, in_blocks, list_choices, logits_at_once, strategy_of
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput

EXPECTED = Path(__file__).with_name("expected_losses.json")
VOCAB, CHUNK, SAMPLES = 40, 7, 3
EVALUATING = StepContext(1, 4, training=False)
OPTIONS: Mapping[str, list[dict[str, Any]]] = {
    "eagle3": [
        {},
        {"step_decay": 0.5},
        {"objective": "lk_alpha"},
        {"objective": "lk_lambda"},
        {"objective": "lk_lambda", "kl_scale": 0.7, "kl_decay": 2.0},
    ],
    "peagle": [{}, {"train_embeddings": False}],
    "dflash": [
        {},
        {"gamma": 2.0},
        {"weighting": "dpace"},
        {"weighting": "dpace_cumulative_confidence"},
        {"weighting": "dpace_continuation_value"},
    ],
    "dflash2": [{}, {"gamma": 2.0}, {"weighting": "dpace"}, {"selector_loss_alpha": 0.3, "conv_kernel_size": 3}],
    "domino": [
        {},
        {"gamma": 2.0},
        {"weighting": "dpace"},
        {"lambda_base_start": 0.0},
        {"pure_draft_prefix_len": 2},
        {"shift_label": False},
    ],
    "dspark": [
        {},
        {"gamma": 2.0},
        {"weighting": "dpace"},
        {"ce_weight": 0.0},
        {"tv_weight": 0.0},
        {"confidence_head": False},
        {"markov_rank": 0, "confidence_with_markov": False},
        {"markov_head_type": "gated", "confidence_with_markov": False},
        {"markov_head_type": "rnn"},
    ],
    "xpress": [{}, {"weighting": "dpace"}, {"base_weight": 0.0}, {"consistency_passes": 1}],
    "lilicorr": [{}, {"ce_weight": 0.125, "margin_weight": 0.125}, {"penalty_weight": 0.0, "weighting": "dpace"}],
}
CASES = [
    Case(strategy, {**options, "loss": loss})
    for strategy, choices in OPTIONS.items()
    for options in choices
    for loss in ("token_mean", "specforge")
]


ONCE = cover(CASES, list_choices)
"""Each option with one of both losses, and each strategy with both."""


def name_of(case: Case) -> str:
    return " ".join([case.strategy, *(f"{key}={value}" for key, value in case.options.items())])


def measured(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """What training on a small batch gives, and what evaluating on it does, midway where both losses of Domino count."""
    more = {"objective_chunk_blocks": CHUNK} if in_blocks(case.strategy) else {}
    strategy = strategy_of(case, VOCAB, dtype, **more)
    batch = batch_of(strategy, SAMPLES, VOCAB, holes=0.2)
    with logits_at_once(CHUNK * VOCAB, CHUNK):
        trained = strategy.forward_loss(batch, StepContext(1, 4, training=True))
        trained.loss_sum.backward()
        with torch.no_grad():
            evaluated = strategy.forward_loss(batch, EVALUATING)
    return {"trained": sums(trained), "evaluated": sums(evaluated), "gradients": digests(strategy)}


def sums(output: StepOutput) -> dict[str, Any]:
    scalars = {"loss_sum": output.loss_sum.item(), "loss_weight": output.loss_weight.item()}
    return {**scalars, **{name: counts.tolist() for name, counts in sorted(output.metric_sums.items())}}


def digests(strategy: DraftStrategy) -> dict[str, list[float]]:
    """Of every parameter's gradient: its norm, and its product with a fixed random direction."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, weight in sorted(strategy.model.named_parameters()):
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        gradient = torch.zeros_like(direction) if weight.grad is None else weight.grad.double()
        found[name] = [gradient.norm().item(), float((gradient * direction).sum() / weight.numel() ** 0.5)]
    return found


@pytest.mark.parametrize("case", gate_or_long(CASES, ONCE), ids=name_of)
def test_evaluating_measures_the_same_whether_autograd_records_or_not(case: Case) -> None:
    strategy = strategy_of(case, VOCAB)
    batch = batch_of(strategy, SAMPLES, VOCAB, holes=0.2)
    recorded = strategy.forward_loss(batch, EVALUATING)
    with torch.no_grad():
        unrecorded = strategy.forward_loss(batch, EVALUATING)
    assert recorded.loss_sum.requires_grad
    assert sums(recorded) == sums(unrecorded)


@pytest.fixture(scope="module")
def expected() -> Mapping[str, Any]:
    return json.loads(EXPECTED.read_text())


def test_every_case_is_in_the_file(expected: Mapping[str, Any]) -> None:
    assert list(expected) == [name_of(case) for case in CASES]


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    gate_or_long(
        (
            pytest.param(case, dtype, tolerance, id=f"{name_of(case)}-{name}")
            for case in CASES
            for dtype, tolerance, name in ((torch.float64, 1e-9, "f64"), (torch.float32, 1e-5, "f32"))
        ),
        lambda cell: cell[1] == torch.float64 or cell[0] in ONCE,
    ),
)
def test_losses_counts_and_gradients_are_those_in_the_file(
    expected: Mapping[str, Any], case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    wanted, found = expected[name_of(case)], measured(case, dtype)
    for part in ("trained", "evaluated"):
        assert found[part].keys() == wanted[part].keys()
        for name, value in wanted[part].items():
            exact = name.endswith(("corrects", "acc_denoms"))
            assert close(found[part][name], value, 0 if exact else tolerance), (part, name)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, (norm, along) in wanted["gradients"].items():
        assert close(found["gradients"][name], [norm, along], 0, absolute=tolerance * norm + 1e-12), name


def close(found: Any, value: Any, relative: float, absolute: float = 0.0) -> bool:
    both: list[Tensor] = [torch.as_tensor(each, dtype=torch.float64) for each in (found, value)]
    return both[0].shape == both[1].shape and torch.allclose(*both, rtol=relative, atol=absolute)


def rounded(value: Any) -> Any:
    """To twelve digits, which is what the file keeps."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.12g}")


if __name__ == "__main__":
    found = {name_of(case): rounded(measured(case, torch.float64)) for case in CASES}
    lines = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found.items())
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
