"""What a strategy counts beside the acceptance ladder, picked from an evaluation's metrics. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVERYBODYS = frozenset(
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
"""Names that `EvalResult.metrics` has with `eval/` before and the position behind them."""
_BY_POSITION = ("eval/ploss_", *(f"eval/{name}_" for name in ACCEPTANCE_RATES))


def select_strategy_metrics(metrics: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """Of the metrics of `EvalResult.metrics`, those that only this strategy has, without `eval/`: Domino's `accept_len`,
    DSpark's `tau`. A number each, or one per position.
    """
    return {
        name.removeprefix("eval/"): value
        for name, value in metrics.items()
        if name not in _EVERYBODYS and not name.startswith(_BY_POSITION)
    }


def format_rates_by_position(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Of the `ACCEPTANCE_RATES`, those that were counted, each in a line."""
    found: dict[str, str] = {}
    for name in ACCEPTANCE_RATES:
        values = [metrics[key] for key in metrics if key.startswith(f"eval/{name}_")]
        if values:
            found[name] = " · ".join(f"{value:.3f}" for value in values)
    return found
