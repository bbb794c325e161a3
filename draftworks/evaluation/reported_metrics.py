"""The metrics that an evaluation will report, known before there is one: an example of it, with made-up values."""

from __future__ import annotations

from typing import Any

from draftworks.config.strategies import MetricSums
from draftworks.evaluation.result import CORRECT, SUPERVISED, EvalResult


def make_example_metrics(sums: MetricSums) -> dict[str, Any]:
    """Return `EvalResult.metrics` of an evaluation with these sums, rungs 2 and 3 replayed. Its values mean nothing."""
    names = {**dict.fromkeys(sums.by_place, sums.places), **dict.fromkeys(sums.by_block, 1)}
    counted = {CORRECT: sums.places, SUPERVISED: sums.places}
    counted |= {f"{name}_{part}": count for name, count in names.items() for part in ("sums", "denoms")}
    counted |= {f"{rung}_{part}": 1 for rung in ("block", "walk") for part in ("passes", "accepted")}
    return EvalResult(1.0, 1.0, 1, {name: (1.0,) * count for name, count in counted.items()}).metrics()
