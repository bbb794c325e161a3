"""Finds strategies that a run lacks since the code location that started it was loaded before an entry named them.

The UI starts a run with the steps and assets that it shows. Sensors, schedules and the command line name the job alone,
and the run's own process finds its assets in the registry as it is then.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.storage.asset_names import of_strategy


def find_left_out_strategies(target: TargetSpec, whole: Set[str], chosen: Set[str]) -> list[str]:
    """Return the strategies of a target of which a run makes nothing although its job does; none where a run lacks
    something else too, which somebody has chosen so.

    Args:
        whole: names of the assets of the run's job.
        chosen: those that the run makes.
    """
    left, found = set(whole - chosen), []
    for name in target.strategies:
        names = of_strategy(name)
        own = whole & set(names)
        if own and not chosen & (own - {names.recipe, names.export_recipe}):
            found.append(name)
            left -= own
    return [] if left else found


def list_assets_of_job(job: Any, name: str) -> set[str]:
    """Return the names of the assets of a job, whatever a run selects of them."""
    repository: dg.RepositoryDefinition | None = job.get_repository_definition()
    definition = job.get_definition() if repository is None else repository.get_job(name)
    return to_names(definition.asset_layer.selected_asset_keys)


def to_names(keys: Iterable[dg.AssetKey]) -> set[str]:
    return {key.to_user_string() for key in keys}
