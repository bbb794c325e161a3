"""The code location: everything Dagster knows, built from one registry folder."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from draftworks.config.strategies import available_strategies, resolve_strategy
from draftworks.targets.registry import HELDOUT, Registry
from jobs import all_jobs
from resources.launchers import make_launcher
from resources.sglang_server import SGLangServer
from resources.workspace import Workspace
from sensors import all_schedules, all_sensors
from spec_assets import data, features, inputs
from spec_assets.console import console
from spec_assets.drafts import draft_asset, draft_check
from spec_assets.evals import eval_features_asset, eval_features_check, eval_set_assets
from spec_assets.executor import executor
from spec_assets.exports import export_asset, export_checks
from spec_assets.leaderboard import leaderboard_asset
from spec_assets.partitions import partition_assets, partition_checks, target_partitions
from spec_assets.recipes import recipe_assets
from spec_assets.report_checks import report_checks
from spec_assets.reports import report_asset
from spec_assets.serving import serving_asset, serving_check

REGISTRY = Path(__file__).resolve().parents[1] / "registry"
MODULES = [inputs, data, features]
PRELOADED = ["spec_assets.definitions", "dagster._core.storage.sqlite_storage"]
"""What the process of every step begins with: this module, all that it imports, and Dagster's own storage, which is
half of what a step that finds everything made would otherwise spend."""


def build_definitions(registry_root: Path) -> dg.Definitions:
    """Definitions for any registry; another deployment is another folder."""
    registry = Registry(registry_root)
    targets, evals = target_partitions(registry), free_eval_names(registry)
    strategies = [resolve_strategy(name) for name in available_strategies()]
    exported = [strategy for strategy in strategies if strategy.exports]
    assets = [
        *dg.load_assets_from_modules(MODULES),
        recipe_assets(strategies),
        *(made for name in evals for made in eval_set_assets(name)),
        *(eval_features_asset(name) for name in [HELDOUT, *evals]),
        *(draft_asset(strategy) for strategy in strategies),
        *(report_asset(strategy, evals) for strategy in strategies),
        *map(export_asset, exported),
        *map(serving_asset, exported),
    ]
    checks = [
        *map(eval_features_check, [HELDOUT, *evals]),
        *map(draft_check, strategies),
        *(check for strategy in strategies for check in report_checks(strategy)),
        *map(export_checks, exported),
        *map(serving_check, exported),
    ]
    workspace = Workspace(registry_root=str(registry_root))
    return dg.Definitions(
        assets=[*partition_assets(assets, targets), leaderboard_asset(strategies)],
        asset_checks=partition_checks(checks, targets),
        jobs=all_jobs(evals),
        sensors=all_sensors(registry),
        schedules=all_schedules(registry),
        resources={
            "workspace": workspace,
            "launcher": make_launcher(registry.load_deployment().launcher),
            "sglang": SGLangServer(**workspace.sglang.model_dump()),
        },
        executor=executor(registry, preload=PRELOADED),
        loggers={"console": console},
    )


def free_eval_names(registry: Registry) -> list[str]:
    """Their assets are named after them, so a name that is taken gets none. `draftworks check` and the targets that
    list it say so."""
    return [name for name in registry.list_eval_sets() if name != HELDOUT]


defs = build_definitions(REGISTRY)
