"""Holm's correction of p-values for several questions that are asked at once. No numpy."""

from __future__ import annotations

from collections.abc import Sequence


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjustment of p-values, in their order (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
