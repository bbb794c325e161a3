"""The assets `{strategy}_observed`: what servers in production accept. They exist where an entry has `servers`, or logs."""

from collections.abc import Collection
from typing import Any

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import StrategySpec
from draftworks.errors import ConfigError, DraftworksError, EngineError
from draftworks.evaluation.acceptance_length import NAME
from draftworks.storage.identity import digest
from draftworks.storage.names import TARGET_MODEL, of_strategy
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from spec_assets.common import asset, require_target
from spec_assets.metadata import embed_png, round_figures

GROUP = "production"


def list_observed_strategies(registry: Registry) -> list[str]:
    """Return the strategies whose drafts are observed for some target. Entries without `servers` and `observation` are not
    parsed."""
    found: set[str] = set()
    for name in sorted({*registry.list_targets_with("servers"), *registry.list_targets_with("observation")}):
        try:
            found.update(registry.load_target(name).observed_strategies)
        except DraftworksError:
            continue  # its first step says what is wrong with it
    return sorted(found)


def make_observed_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_observed`, for targets with `servers` or logs of requests. Each materialization is a reading."""
    names = of_strategy(strategy.name)

    @asset(
        group=GROUP,
        kinds=["prometheus"],
        name=names.observed,
        description=f"What servers accept of the {strategy.name} draft, by their own counters and by logged requests, beside the "
        "draft's first hours there and the walk.",
        deps=[TARGET_MODEL, names.report],
        optional=True,
    )
    def observed(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
        from draftworks.production.served_logs import read_served_logs
        from draftworks.production.standing import assess_all

        target = require_target(context, workspace)
        if strategy.name not in target.observed_strategies:
            raise ConfigError(
                f"target {target.name}: neither servers nor logs of requests of {strategy.name} are observed"
            )
        observations = _observe_servers(context, workspace, target, strategy.name)
        standings = assess_all(observations, target.observation, workspace.artifacts, target.name)
        readings: list[Any] = [one.readings[-1].to_json() if one.readings else None for one in observations]
        metadata = describe_servers(target.name, standings) if standings else {}
        if target.observation.requests is not None:
            logs = read_served_logs(target, workspace.registry.root, workspace.artifacts, strategy.name)
            metadata |= describe_requests(target.name, logs)
            readings.append([[one.draft, one.since, one.until] for one in logs.standings] + [logs.reading.lines])
        return dg.MaterializeResult(data_version=dg.DataVersion(digest(readings)), metadata=round_figures(metadata))

    return observed


def _observe_servers(
    context: dg.AssetExecutionContext, workspace: Workspace, target: TargetSpec, strategy: str
) -> list[Any]:
    """Read the servers of a strategy, and warn of those that cannot be read. Raises EngineError if none can."""
    from draftworks.production.observer import Observer

    if not any(server.strategy == strategy for server in target.servers):
        return []
    observations = Observer.of(target, workspace.registry.root, workspace.var).observe(strategy)
    problems = [one.problem for one in observations if one.problem is not None]
    for problem in problems:
        context.log.warning(problem)
    if len(problems) == len(observations):
        raise EngineError("no server could be read:\n" + "\n".join(problems))
    return observations


def describe_requests(target: str, logs: Any) -> dict[str, Any]:
    """Return metadata: the tables of slices, and figures that Dagster plots over time."""
    from draftworks.production.served_view import render_markdown, select_figures

    return {"requests": dg.MetadataValue.md(render_markdown(target, logs)), **select_figures(logs.standings)}


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
