"""Metrics that one strategy has beside the acceptance ladder, selected from an evaluation's metrics. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.evaluation.acceptance_length import count_own_token

_COMMON_METRICS = frozenset(
    f"eval/{name}"
    for name in (
        "avg_acc",
        "avg_loss",
        "per_position_acc",
        "rung2_block_acc_len",
        "rung3_walk_acc_len",
        "simulated_acc_len",
        "supervised_tokens",
    )
)
ACCEPTANCE_RATES = ("acceptance_rate", "conditional_acceptance_rate", "unconditional_acceptance_rate")
"""In `EvalResult.metrics` these are named `eval/{rate}_{position}`."""
_LENGTHS = {
    "accept_len": "acceptance_length",
    "base_accept_len": "base_acceptance_length",
    "lattice_len": "lattice_acceptance_length",
    "tau": "sampled_acceptance_length",
}
"""Metrics that are accepted draft tokens per pass, and their names where the target's own token counts too."""
_NUMBERED = ("eval/ploss_", "eval/simulated_acc_len_t", *(f"eval/{name}_" for name in ACCEPTANCE_RATES))


def select_strategy_metrics(metrics: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """Return the metrics that only this strategy has, without `eval/`: a number each, or one per position.

    Examples are Domino's `accept_len` and DSpark's `tau`.

    Args:
        metrics: from `EvalResult.metrics`.
    """
    return {
        name.removeprefix("eval/"): value
        for name, value in metrics.items()
        if name not in _COMMON_METRICS and not name.startswith(_NUMBERED)
    }


def describe_strategy_metrics(metrics: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """Return `select_strategy_metrics` as people are shown them: acceptance lengths count the target's own token."""
    return {
        _LENGTHS.get(name, name): count_own_token(value) if name in _LENGTHS and isinstance(value, float) else value
        for name, value in select_strategy_metrics(metrics).items()
    }


def format_rates_by_position(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return each of the `ACCEPTANCE_RATES` that was measured, as one line of values by position."""
    found: dict[str, str] = {}
    for name in ACCEPTANCE_RATES:
        values = [metrics[key] for key in metrics if key.startswith(f"eval/{name}_")]
        if values:
            found[name] = " · ".join(f"{value:.3f}" for value in values)
    return found
