"""Schedules that evaluate targets again, one for all targets with the same `evaluation.cron` and time zone; of pruning."""

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.fleet.staleness import find_published_drafts
from draftworks.storage.identity import digest
from draftworks.storage.words import format_count, list_names
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.running_targets import describe_run, find_runs_under_way

NEITHER_MEASURES_NOR_CAPTURES = ("resolve", "serve")
"""Jobs that may run at the same time as an evaluation of the same target."""

log = logging.getLogger(__name__)
_IN_FIELDS = str.maketrans({"*": "any", "/": "_per_", "-": "_to_", ",": "_and_"})
_IN_ZONES = str.maketrans({"/": "_", "-": "_minus_", "+": "_plus_"})
"""Dagster's names are letters, digits and underscores."""
LONGEST_NAME = 80


@dataclass(frozen=True, order=True)
class Cadence:
    """Cron expression and time zone at which a target is evaluated again."""

    cron: str
    timezone: str

    @property
    def schedule_name(self) -> str:
        """Unique name made from the times alone: `0 3 * * 1` in UTC is `evaluate_0_3_any_any_1_UTC`.

        Targets are not part of it, so a schedule that was switched on stays on when targets are added or removed.
        """
        fields = "_".join(self.cron.split()).translate(_IN_FIELDS)
        name = f"evaluate_{fields}_{self.timezone.translate(_IN_ZONES)}"
        return name if len(name) <= LONGEST_NAME else self.former_name

    @property
    def former_name(self) -> str:
        """The schedule's name in the first version; still used if the present one would be too long."""
        return f"evaluate_{digest([self.cron, self.timezone])}"


def make_evaluation_schedules(registry: Registry, status: dg.DefaultScheduleStatus) -> list[dg.ScheduleDefinition]:
    """Return a schedule for each cadence of the registry."""
    return [
        make_evaluation_schedule(cadence, targets, status)
        for cadence, targets in sorted(read_cadences(registry).items())
    ]


def make_fleet_schedule(status: dg.DefaultScheduleStatus) -> dg.ScheduleDefinition:
    """Return the schedule that writes the page of the fleet anew every hour."""
    return dg.ScheduleDefinition(
        name="fleet_hourly",
        job_name="page",
        cron_schedule="17 * * * *",
        default_status=status,
        description="Writes the page of the fleet anew, from records alone.",
    )


def read_cadences(registry: Registry) -> dict[Cadence, list[str]]:
    """Return the targets of each cadence. Targets without a cron or with an unreadable entry are left out, and entries
    without the word are not parsed."""
    found: dict[Cadence, list[str]] = {}
    for target in registry.list_targets_with("cron"):
        try:
            evaluation = registry.load_target(target).evaluation
        except DraftworksError as error:
            log.warning("target %s is in no schedule: %s", target, error)
            continue
        if evaluation.cron is not None:
            found.setdefault(Cadence(evaluation.cron, evaluation.cron_timezone), []).append(target)
    return found


def make_evaluation_schedule(
    cadence: Cadence, targets: Sequence[str], status: dg.DefaultScheduleStatus
) -> dg.ScheduleDefinition:
    """Return the schedule of one cadence. Its ticks skip targets that have no draft or a running run."""

    @dg.schedule(
        name=cadence.schedule_name,
        job_name="evaluate",
        cron_schedule=cadence.cron,
        execution_timezone=cadence.timezone,
        default_status=status,
        description=f"Evaluates {format_count(len(targets), 'target')} again: {list_names(targets, 10)}",
    )
    def evaluate_again(
        context: dg.ScheduleEvaluationContext, workspace: Workspace
    ) -> list[dg.RunRequest] | dg.SkipReason:
        if context.instance_ref is not None and is_switched_off(context.instance, cadence):
            return dg.SkipReason(
                f"switched off in the UI under its former name, {cadence.former_name}: switch {cadence.schedule_name} on there"
            )
        busy = (
            {} if context.instance_ref is None else find_runs_under_way(context.instance, NEITHER_MEASURES_NOR_CAPTURES)
        )
        reasons = {target: find_reason_to_skip(workspace, target, busy.get(target)) for target in targets}
        skipped = [f"{target}: {reason}" for target, reason in reasons.items() if reason is not None]
        time = context.scheduled_execution_time.astimezone(datetime.UTC).isoformat()
        requests = [
            dg.RunRequest(run_key=f"{target}:{time}", partition_key=target)
            for target, reason in reasons.items()
            if reason is None
        ]
        if not requests:
            return dg.SkipReason("; ".join(skipped))
        for line in skipped:
            context.log.info(f"skipped {line}")
        return requests

    return evaluate_again


def is_switched_off(instance: dg.DagsterInstance, cadence: Cadence) -> bool:
    """Whether a person switched a schedule off under its former name, and has not switched it on under the present
    one."""
    if cadence.former_name == cadence.schedule_name:
        return False
    by_hand = {state.instigator_name: state.status.value for state in instance.all_instigator_state()}
    return by_hand.get(cadence.former_name) == "STOPPED" and by_hand.get(cadence.schedule_name) != "RUNNING"


def find_reason_to_skip(workspace: Workspace, target: str, busy: dg.DagsterRun | None = None) -> str | None:
    """Return why a target is skipped (no draft, or a run that is queued or running); None if it is to be evaluated."""
    if busy is not None:
        return f"{describe_run(busy)}: checked again at the next tick"
    try:
        drafts = find_published_drafts(workspace.artifacts, workspace.registry.load_target(target))
    except DraftworksError as error:
        return str(error)
    return None if drafts else "none of its strategies has a draft yet: train one first"


def make_prune_schedules(registry: Registry) -> list[dg.ScheduleDefinition]:
    """Return the schedule of `retention.cron`, switched on; none if it is not set."""
    cron = registry.load_deployment().retention.cron
    if cron is None:
        return []
    return [
        dg.ScheduleDefinition(
            name="prune_by_schedule",
            job_name="prune",
            cron_schedule=cron,
            run_config={"ops": {"prune_results": {"config": {"remove": True}}}},
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description="Removes what no result in use was made from; see docs/how-to/retention.md.",
        )
    ]
