"""The sensor that tells people of failures, regressions, decisions, promotions and rollbacks."""

from __future__ import annotations

import time

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.notifications.bookmark import Bookmark, find_bookmark
from draftworks.notifications.channels import Channels
from draftworks.notifications.event import Event
from draftworks.notifications.records import find_decision_events, find_service_events
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.run_events import begin_bookmark, find_run_events

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
    """Look for what has happened since the last tick, keep it for the channels, send what is due.

    The first tick only marks where it begins. Events are kept before the mark moves: a tick that is killed finds them
    again, and knows those that it kept.
    """
    deployment = workspace.registry.load_deployment()
    if not deployment.notifications:
        return ["notifications has no channel"]
    with Channels(workspace.var, deployment.notifications) as channels:
        if not channels.is_held:
            return ["another process is sending"]
        bookmark = find_bookmark(workspace.var)
        if bookmark is None:
            bookmark = Bookmark()
            begin_bookmark(context.instance, bookmark, time.time())
            find_new_records(context, workspace, bookmark, quiet=True)
            bookmark.save(workspace.var)
            return ["from now on is told what happens"]
        events = find_run_events(context.instance, bookmark, deployment.ui_url)
        events += find_new_records(context, workspace, bookmark, quiet=False)
        new = channels.add(events)
        bookmark.save(workspace.var)
        words = [f"{new} new event{'' if new == 1 else 's'}"] if new else []
        return words + channels.send(context.log.warning, SENDING_S)


def find_new_records(
    context: dg.SensorEvaluationContext, workspace: Workspace, bookmark: Bookmark, quiet: bool
) -> list[Event]:
    """Return what the records of drafts in service and of decisions say that is new."""
    warn = context.log.warning
    return [
        *find_service_events(workspace.var, bookmark.service, warn, quiet),
        *find_decision_events(workspace.var, bookmark.decisions, warn, quiet),
    ]
