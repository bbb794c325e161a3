"""The assets `{strategy}_observed`: what servers in production accept. They exist where a registry entry has `servers:`."""

from collections.abc import Collection
from typing import Any

import dagster as dg

from draftworks.config.strategies import StrategySpec
from draftworks.errors import DraftworksError, EngineError
from draftworks.evaluation.acceptance_length import NAME
from draftworks.storage.identity import digest
from draftworks.storage.names import TARGET_MODEL, of_strategy
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from spec_assets.common import asset, require_target
from spec_assets.metadata import embed_png, round_figures

GROUP = "production"


def list_observed_strategies(registry: Registry) -> list[str]:
    """Return the strategies whose drafts the servers of some target serve. Entries without `servers` are not parsed."""
    found: set[str] = set()
    for name in registry.list_targets_with("servers"):
        try:
            found.update(server.strategy for server in registry.load_target(name).servers)
        except DraftworksError:
            continue  # its first step says what is wrong with it
    return sorted(found)


def make_observed_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_observed`, for targets with `servers`. Each materialization is a reading."""
    names = of_strategy(strategy.name)

    @asset(
        group=GROUP,
        kinds=["prometheus"],
        name=names.observed,
        description=f"What servers accept of the {strategy.name} draft, by their own counters, beside the draft's first hours "
        "there and the walk.",
        deps=[TARGET_MODEL, names.report],
        optional=True,
    )
    def observed(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
        from draftworks.production.observer import Observer
        from draftworks.production.standing import assess_all

        target = require_target(context, workspace)
        observer = Observer.of(target, workspace.registry.root, workspace.var)
        observations = observer.observe(strategy.name)
        problems = [one.problem for one in observations if one.problem is not None]
        for problem in problems:
            context.log.warning(problem)
        if problems and len(problems) == len(observations):
            raise EngineError("no server could be read:\n" + "\n".join(problems))
        standings = assess_all(observations, target.observation, workspace.artifacts, target.name)
        readings = [one.readings[-1].to_json() if one.readings else None for one in observations]
        return dg.MaterializeResult(
            data_version=dg.DataVersion(digest(readings)),
            metadata=round_figures(describe_servers(target.name, standings)),
        )

    return observed


def describe_servers(target: str, standings: Any) -> dict[str, Any]:
    """Return metadata: the table, a plot of the series, and figures that Dagster plots over time."""
    from draftworks.production.standing import plot_series, render_markdown, select_figures

    metadata: dict[str, Any] = {"servers": dg.MetadataValue.md(render_markdown(standings)), **select_figures(standings)}
    picture = plot_series(standings, target)
    if picture is not None:
        metadata["series"] = embed_png(picture, NAME)
    return metadata


def make_observe_jobs(strategies: Collection[str]) -> list[Any]:
    """Return the job `observe`; none where no target has servers."""
    if not strategies:
        return []
    return [
        dg.define_asset_job(
            "observe",
            selection=dg.AssetSelection.assets(*(of_strategy(strategy).observed for strategy in strategies)),
            description="Read the counters of a target's servers once.",
        )
    ]
