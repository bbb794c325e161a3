"""Asset jobs, each run for one partition (target model) at a time."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from draftworks.config.strategies import available_strategies, resolve_strategy
from draftworks.storage.asset_names import of_eval_set, of_strategy

INPUTS = dg.AssetSelection.groups("inputs")
SERVING = dg.AssetSelection.groups("serving")


def all_jobs(evals: Sequence[str]) -> list:
    """`resolve`, `prepare`, `train_{strategy}` for each strategy, `evaluate`, `serve`, `leaderboard` and
    `everything`."""
    prepare = INPUTS | dg.AssetSelection.groups("data", "features")
    eval_data = [asset for name in ["heldout", *evals] for asset in of_eval_set(name)[1:]]
    evaluate = INPUTS | dg.AssetSelection.groups("reports") | dg.AssetSelection.assets(*eval_data)
    return [
        _job("resolve", INPUTS, "Look at the inputs again and record what they are now."),
        _job("prepare", prepare, "From conversations to captured features."),
        *(_train_job(strategy) for strategy in available_strategies()),
        _job("evaluate", evaluate, "Measure the drafts that exist."),
        _job(
            "serve",
            INPUTS | SERVING,
            "Ask a live server what it accepts of the exported drafts, where a target wants it.",
        ),
        _job("leaderboard", dg.AssetSelection.assets("leaderboard"), "Where every draft of every target stands now."),
        _job("everything", dg.AssetSelection.all(), "From conversations to measured and exported drafts."),
    ]


def _train_job(strategy: str) -> object:
    names = [of_strategy(strategy).draft, of_strategy(strategy).report]
    if resolve_strategy(strategy).exports:
        names.append(of_strategy(strategy).export)
    selection = INPUTS | dg.AssetSelection.assets(*names)
    return _job(
        f"train_{strategy}", selection, f"Train, measure and export the {strategy} draft on features that exist."
    )


def _job(name: str, selection: dg.AssetSelection, description: str) -> object:
    return dg.define_asset_job(name, selection=selection, description=description)
