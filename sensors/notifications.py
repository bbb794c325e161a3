"""The sensors that tell people of failures, regressions, decisions, promotions and rollbacks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

import dagster as dg

from draftworks.config.strategies import list_strategies
from draftworks.errors import DraftworksError
from draftworks.notifications.outbox import Bookmark, Event
from draftworks.storage.names import of_strategy
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry
from resources.run_problems import RunProblems, describe_check
from resources.workspace import Workspace
from sensors.running_targets import PARTITION_TAG

ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
OVERLAP_S = 60.0
"""Runs are looked for again that ended so long before the newest: a database may show them late."""
MOST_RUNS = 300
"""Runs of one tick; the others follow at the next."""
NO_REGRESSION = ("draft_is_current",)
"""Checks of a report that say something else than that a draft is worse."""
READ = {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.ASSET_CHECK_EVALUATION, dg.DagsterEventType.RUN_FAILURE}


@dataclass(frozen=True)
class EndedRuns:
    """The runs of an instance that have ended.

    Attributes:
        ui_url: address of Dagster's UI, for links; None for none.
    """

    instance: dg.DagsterInstance
    ui_url: str | None

    def begin(self, bookmark: Bookmark) -> None:
        """Mark all runs that have ended as looked at."""
        bookmark.runs_after = time.time()
        remember_runs(bookmark, list_ended_runs(self.instance, bookmark.runs_after - OVERLAP_S))

    def find(self, bookmark: Bookmark) -> list[Event]:
        """Return the events of runs that ended since, and bring the bookmark up to date."""
        records = list_ended_runs(self.instance, bookmark.runs_after - OVERLAP_S)
        new = [each for each in records if each.dagster_run.run_id not in bookmark.runs][:MOST_RUNS]
        events = [event for record in new for event in read_run_events(self.instance, record, self.ui_url)]
        remember_runs(bookmark, new)
        return events


def list_ended_runs(instance: dg.DagsterInstance, after: float) -> list[dg.RunRecord]:
    """Return the runs that ended after a Unix time, oldest first."""
    since = datetime.fromtimestamp(max(after, 0.0), UTC)
    found = instance.get_run_records(dg.RunsFilter(statuses=ENDED, updated_after=since))
    return sorted(found, key=lambda record: record.update_timestamp)


def remember_runs(bookmark: Bookmark, records: Iterable[dg.RunRecord]) -> None:
    for record in records:
        at = _to_seconds(record.update_timestamp)
        bookmark.runs[record.dagster_run.run_id] = at
        bookmark.runs_after = max(bookmark.runs_after, at)
    bookmark.runs = {run: at for run, at in bookmark.runs.items() if at >= bookmark.runs_after - 2 * OVERLAP_S}


def read_run_events(instance: dg.DagsterInstance, record: dg.RunRecord, ui_url: str | None) -> list[Event]:
    """Return the failure of a run with its first cause, and the checks in it by which a draft became worse."""
    run = record.dagster_run
    target = run.tags.get(PARTITION_TAG, "")
    when = datetime.fromtimestamp(_to_seconds(record.update_timestamp), UTC).isoformat(timespec="seconds")
    link = None if ui_url is None else f"{ui_url}/runs/{run.run_id}"
    problems, message, events = RunProblems(), "", []
    for entry in instance.all_logs(run.run_id, of_type=READ):
        event = entry.dagster_event
        if event is None:
            continue
        problems.note(event)
        if event.event_type is dg.DagsterEventType.RUN_FAILURE:
            message = event.message or ""
        elif event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            check = event.asset_check_evaluation_data
            if not check.passed and is_regression(check.asset_key.to_user_string(), check.check_name):
                asset, said = check.asset_key.to_user_string(), describe_check(check)
                title = f"{asset}: {check.check_name} failed"
                subject = [asset, check.check_name, said]
                events.append(Event.make("regression", target, subject, title, said, when, link))
    if run.status is dg.DagsterRunStatus.FAILURE:
        cause = problems.describe_failure() or message or "no reason was given"
        title = f"run {run.run_id[:8]} of {run.job_name} failed"
        events.append(Event.make("failure", target, run.run_id, title, shorten_cause(cause), when, link))
    return events


def is_regression(asset: str, check: str) -> bool:
    """Whether the failure of a check says that a draft is worse than another: those of reports and of promotions."""
    names = [of_strategy(name) for name in list_strategies()]
    return asset in {each for one in names for each in (one.report, one.promoted)} and check not in NO_REGRESSION


def shorten_cause(cause: str) -> str:
    """Return a cause without its traceback, of which the last line is kept: frames are for the run's page."""
    head, found, trace = cause.partition("Traceback (most recent call last):")
    lines = trace.strip().splitlines()
    return f"{head}{lines[-1] if lines else ''}".strip() if found else cause


def _to_seconds(timestamp: datetime) -> float:
    """Return the Unix time of a run record, whose times are in UTC and may have no zone."""
    return (timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=UTC)).timestamp()


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
    from draftworks.notifications.records import keep_new_events

    runs, warn = EndedRuns(context.instance, deployment.ui_url), context.log.warning
    with Channels(workspace.var, deployment.notifications) as channels:
        if not channels.is_held:
            return ["another process is sending"]
        new = keep_new_events(workspace.var, channels, runs, warn)
        if new is None:
            return ["from now on is told what happens"]
        words = [format_count(new, "new event")] if new else []
        return words + channels.send(warn, SENDING_S)
