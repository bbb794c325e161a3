"""The jobs that decisions start: a draft and all that it is made from, measured, exported and judged for service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dagster as dg

from draftworks.decision.record import Choice
from draftworks.storage.names import FP8_GATE, of_strategy

DESCRIPTIONS = {
    Choice.RETRAIN: "Train a draft from the start on the data of today, and all that it needs; the rule of promotion decides "
    "whether it goes into service.",
    Choice.TUNE: "Go on training a draft, the one that the run configuration's `start_from` names, on the data of today.",
}


def name_training_job(choice: Choice, strategy: str) -> str:
    return f"{choice}_{strategy}"


def make_training_jobs(strategies: Iterable[str]) -> list[Any]:
    """Return the jobs `retrain_{strategy}` and `tune_{strategy}` of the strategies that have a decision."""
    return [
        dg.define_asset_job(
            name_training_job(choice, strategy),
            selection=dg.AssetSelection.assets(of_strategy(strategy).decision).upstream()
            - dg.AssetSelection.assets(FP8_GATE),
            description=description,
        )
        for strategy in strategies
        for choice, description in DESCRIPTIONS.items()
    ]
