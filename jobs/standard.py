"""Asset jobs, each run for one partition (target model) at a time, and those that decisions start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dagster as dg

from draftworks.config.strategies import StrategySpec
from draftworks.decision.record import Choice
from draftworks.storage.names import (
    FLEET,
    FP8_GATE,
    HELDOUT,
    HELDOUT_FEATURES,
    THINKING_COMPARISON,
    of_eval_set,
    of_strategy,
)

INPUTS = dg.AssetSelection.groups("inputs")
JUDGE_FP8 = "judge_fp8"
FLEET_PAGE = "page"
SERVING = dg.AssetSelection.groups("serving")


def make_jobs(evals: Sequence[str], strategies: Sequence[StrategySpec], decided: Sequence[str] = ()) -> list:
    """Return all jobs; `train_{strategy}` exists for each strategy, the others once.

    Args:
        decided: strategies that have the asset `{strategy}_decision`, which is made with the reports.
    """
    prepare = INPUTS | dg.AssetSelection.groups("data", "features")
    eval_data = [asset for name in [HELDOUT, *evals] for asset in of_eval_set(name)]
    eval_data += [of_strategy(strategy).decision for strategy in decided]
    evaluate = INPUTS | dg.AssetSelection.groups("reports") | dg.AssetSelection.assets(*eval_data)
    return [
        _define_job("resolve", INPUTS, "Read the inputs again and record their current versions."),
        _define_job("prepare", prepare, "From conversations to captured features."),
        *map(_define_train_job, strategies),
        _define_job("evaluate", evaluate, "Measure the drafts that exist, on the eval data of today."),
        _define_job(
            "serve",
            INPUTS | SERVING,
            "Measure what a live server accepts of the exported drafts, for targets that request it.",
        ),
        _define_job(
            "leaderboard",
            dg.AssetSelection.assets("leaderboard"),
            "Rank the drafts of all targets by their newest reports.",
        ),
        _define_job(
            FLEET_PAGE,
            dg.AssetSelection.assets(FLEET),
            "Write the page of all drafts: what they promised, do in service, were made from and cost.",
        ),
        _define_job(
            JUDGE_FP8,
            INPUTS | dg.AssetSelection.groups("data") | dg.AssetSelection.assets(HELDOUT_FEATURES, FP8_GATE),
            "Compare drafts trained on plain features and on features in fp8, before these are captured.",
        ),
        _define_job(
            "compare_thinking",
            INPUTS | dg.AssetSelection.groups("data") | dg.AssetSelection.assets(HELDOUT_FEATURES, THINKING_COMPARISON),
            "Train on answers with thinking on, off and both, and compare what is accepted of each.",
        ),
        _define_job(
            "everything",
            dg.AssetSelection.all()
            - dg.AssetSelection.assets(FP8_GATE, THINKING_COMPARISON)
            - dg.AssetSelection.groups("production", FLEET),
            "From conversations to measured and exported drafts.",
        ),
    ]


def _define_train_job(strategy: StrategySpec) -> object:
    names = of_strategy(strategy.name)
    made = [names.draft, names.report, *([names.export] if strategy.exports else ())]
    description = f"Train, measure and export the {strategy.name} draft on features that exist."
    return _define_job(f"train_{strategy.name}", INPUTS | dg.AssetSelection.assets(*made), description)


def _define_job(name: str, selection: dg.AssetSelection, description: str) -> object:
    return dg.define_asset_job(name, selection=selection, description=description)


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
