"""The sensor that tells people of failures, regressions, decisions, promotions and rollbacks."""

from __future__ import annotations

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.run_events import EndedRuns

INTERVAL_S = 30
SENDING_S = 25.0
"""Time of a tick for sending; Dagster ends a tick that takes a minute."""


def make_notification_sensor(registry: Registry) -> dg.SensorDefinition:
    """Return the sensor; it is on where `notifications` of the deployment has a channel."""
    on = bool(registry.load_deployment().notifications)

    @dg.sensor(
        name="notification_sensor",
        minimum_interval_seconds=INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING if on else dg.DefaultSensorStatus.STOPPED,
        description="Tells the channels of `notifications` in registry/deployment.yaml what has happened, each event once.",
    )
    def notify(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SkipReason:
        try:
            return dg.SkipReason("; ".join(tell_people(context, workspace)) or "nothing new")
        except DraftworksError as error:
            context.log.warning(str(error))
            return dg.SkipReason(str(error))

    return notify


def tell_people(context: dg.SensorEvaluationContext, workspace: Workspace) -> list[str]:
    """Look for what has happened since the last tick, keep it for the channels, and send what is due; return words."""
    deployment = workspace.registry.load_deployment()
    if not deployment.notifications:
        return ["notifications has no channel"]
    from draftworks.notifications.channels import Channels  # after this: without a channel nothing of it is imported
    from draftworks.notifications.looking import keep_new_events

    runs, warn = EndedRuns(context.instance, deployment.ui_url), context.log.warning
    with Channels(workspace.var, deployment.notifications) as channels:
        if not channels.is_held:
            return ["another process is sending"]
        new = keep_new_events(workspace.var, channels, runs, warn)
        if new is None:
            return ["from now on is told what happens"]
        words = [format_count(new, "new event")] if new else []
        return words + channels.send(warn, SENDING_S)
