"""The code location: everything Dagster knows, built from one registry folder."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from draftworks.registry import Registry
from draftworks.strategies import available_strategies, resolve_strategy
from jobs import all_jobs
from resources.launchers import launcher_for
from resources.workspace import Workspace
from sensors import all_sensors
from spec_assets import data, features, inputs
from spec_assets.console import console
from spec_assets.drafts import draft_asset, draft_check
from spec_assets.partitions import partitioned, target_partitions
from spec_assets.reports import report_asset, report_check

REGISTRY = Path(__file__).resolve().parents[1] / "registry"


def build_definitions(registry_root: Path) -> dg.Definitions:
    """Definitions for any registry; another deployment is another folder."""
    registry = Registry(registry_root)
    targets = target_partitions(registry)
    strategies = [resolve_strategy(name) for name in available_strategies()]
    assets = [
        *dg.load_assets_from_modules([inputs, data, features]),
        *(draft_asset(strategy) for strategy in strategies),
        *(report_asset(strategy) for strategy in strategies),
    ]
    return dg.Definitions(
        assets=partitioned(assets, targets),
        asset_checks=[*map(draft_check, strategies), *map(report_check, strategies)],
        jobs=all_jobs(),
        sensors=all_sensors(),
        resources={
            "workspace": Workspace(registry_root=str(registry_root)),
            "launcher": launcher_for(registry.deployment().launcher),
        },
        executor=dg.multiprocess_executor.configured({"max_concurrent": 2}),
        loggers={"console": console},
    )


defs = build_definitions(REGISTRY)
