"""The sensor that reads the counters of servers in production. It starts no run: a reading is a few requests."""

from __future__ import annotations

import json
import time
from typing import Any

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.storage.names import of_strategy
from draftworks.targets.registry import Registry
from resources.workspace import Workspace

NAME = "observe_sensor"
INTERVAL_S = 300
TICK_S = 25.0
"""Seconds after which a tick begins with no other target: Dagster ends one that takes 60."""
REPORT_EVERY_S = 3600.0


def make_observe_sensors(registry: Registry) -> list[dg.SensorDefinition]:
    """Return the sensor, switched off, over the targets with `servers`; none where no target has any."""
    targets = registry.list_targets_with("servers")
    if not targets:
        return []

    @dg.sensor(
        name=NAME,
        minimum_interval_seconds=INTERVAL_S,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Reads the counters of servers in production, and records what they accept every hour.",
    )
    def observe(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
        return observe_targets(context, workspace, targets)

    return [observe]


def observe_targets(
    context: dg.SensorEvaluationContext, workspace: Workspace, targets: list[str]
) -> dg.SensorResult | dg.SkipReason:
    """Read the servers of each target, and record an asset event for each strategy that had none for an hour.

    A tick that runs out of time goes on with the next target at the next tick.
    """
    state: dict[str, Any] = json.loads(context.cursor) if context.cursor else {}
    reported: dict[str, float] = state.get("reported", {})
    first = state.get("next", 0) % len(targets)
    begun, events, done = time.monotonic(), [], 0
    for name in [*targets[first:], *targets[:first]]:
        if done and time.monotonic() > begun + TICK_S:
            break
        done += 1
        try:
            events += _observe_target(context, workspace, name, reported)
        except (DraftworksError, OSError) as error:
            context.log.warning(f"target {name}: {error}")
    cursor = json.dumps({"reported": reported, "next": (first + done) % len(targets)}, sort_keys=True)
    return dg.SensorResult(asset_events=events, cursor=cursor)


def _observe_target(
    context: dg.SensorEvaluationContext, workspace: Workspace, name: str, reported: dict[str, float]
) -> list[dg.AssetMaterialization]:
    from draftworks.production.observer import Observer
    from draftworks.production.standing import assess_all, render_markdown, select_figures

    target = workspace.registry.load_target(name)
    if not target.servers:
        return []
    observations = Observer.of(target, workspace.registry.root, workspace.var).observe()
    for one in observations:
        if one.problem is not None:
            context.log.warning(one.problem)
    events, now = [], time.time()
    for strategy in sorted({server.strategy for server in target.servers}):
        key = f"{name}/{strategy}"
        own = [one for one in observations if one.server.strategy == strategy and one.readings]
        if not own or now < reported.get(key, 0.0) + REPORT_EVERY_S:
            continue
        standings = assess_all(own, target.observation, workspace.artifacts, name)
        reported[key] = now
        figures = {figure: float(f"{value:.4g}") for figure, value in select_figures(standings).items()}
        metadata = {"servers": dg.MetadataValue.md(render_markdown(standings)), **figures}
        events.append(dg.AssetMaterialization(of_strategy(strategy).observed, partition=name, metadata=metadata))
    return events
