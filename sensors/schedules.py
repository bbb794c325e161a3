"""Evaluates targets again at the times their registry entries give: one schedule for all targets with the same times."""

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from draftworks.errors import DraftworksError
from draftworks.fleet.staleness import published_drafts
from draftworks.storage.identity import digest
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.under_way import runs_under_way, told

NEITHER_MEASURES_NOR_CAPTURES = ("resolve", "serve")
"""Jobs beside which an evaluation may run."""

log = logging.getLogger(__name__)
_IN_FIELDS = str.maketrans({"*": "any", "/": "_per_", "-": "_to_", ",": "_and_"})
_IN_ZONES = str.maketrans({"/": "_", "-": "_minus_", "+": "_plus_"})
"""Dagster's names are letters, digits and underscores."""
LONGEST_NAME = 80


@dataclass(frozen=True, order=True)
class Cadence:
    """When a target is evaluated again."""

    cron: str
    timezone: str

    @property
    def schedule_name(self) -> str:
        """Of the times alone, so that a schedule that was switched on stays on when targets come and go: `0 3 * * 1` in UTC is
        `evaluate_0_3_any_any_1_UTC`. No two cadences share one."""
        fields = "_".join(self.cron.split()).translate(_IN_FIELDS)
        name = f"evaluate_{fields}_{self.timezone.translate(_IN_ZONES)}"
        return name if len(name) <= LONGEST_NAME else self.former_name

    @property
    def former_name(self) -> str:
        """What schedules were called at first; that of a long list of times still is."""
        return f"evaluate_{digest([self.cron, self.timezone])}"


def evaluation_schedules(registry: Registry, status: dg.DefaultScheduleStatus) -> list[dg.ScheduleDefinition]:
    """A schedule for each cadence of the registry."""
    return [evaluation_schedule(cadence, targets, status) for cadence, targets in sorted(cadences(registry).items())]


def cadences(registry: Registry) -> dict[Cadence, list[str]]:
    """Targets by their cadence; those without one, or with an entry that cannot be read, are in none."""
    found: dict[Cadence, list[str]] = {}
    for target in registry.list_targets():
        try:
            evaluation = registry.load_target(target).evaluation
        except DraftworksError as error:
            log.warning("target %s is in no schedule: %s", target, error)
            continue
        if evaluation.cron is not None:
            found.setdefault(Cadence(evaluation.cron, evaluation.cron_timezone), []).append(target)
    return found


def evaluation_schedule(
    cadence: Cadence, targets: Sequence[str], status: dg.DefaultScheduleStatus
) -> dg.ScheduleDefinition:
    """The schedule of one cadence. Its ticks leave out targets that have no draft to measure, or that a run is at work on."""

    @dg.schedule(
        name=cadence.schedule_name,
        job_name="evaluate",
        cron_schedule=cadence.cron,
        execution_timezone=cadence.timezone,
        default_status=status,
        description=f"Evaluates {len(targets)} targets again: {', '.join(targets[:10])}{' ...' if targets[10:] else ''}",
    )
    def evaluate_again(
        context: dg.ScheduleEvaluationContext, workspace: Workspace
    ) -> list[dg.RunRequest] | dg.SkipReason:
        if context.instance_ref is not None and was_switched_off(context.instance, cadence):
            return dg.SkipReason(
                f"switched off in the UI under its former name, {cadence.former_name}: switch {cadence.schedule_name} on there"
            )
        busy = {} if context.instance_ref is None else runs_under_way(context.instance, NEITHER_MEASURES_NOR_CAPTURES)
        reasons = {target: reason_to_skip(workspace, target, busy.get(target)) for target in targets}
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


def was_switched_off(instance: dg.DagsterInstance, cadence: Cadence) -> bool:
    """Whether a person switched a schedule off under its former name, and has not switched it on under the present one."""
    if cadence.former_name == cadence.schedule_name:
        return False
    by_hand = {state.instigator_name: state.status.value for state in instance.all_instigator_state()}
    return by_hand.get(cadence.former_name) == "STOPPED" and by_hand.get(cadence.schedule_name) != "RUNNING"


def reason_to_skip(workspace: Workspace, target: str, busy: dg.DagsterRun | None = None) -> str | None:
    """Why a target cannot be evaluated, or need not be since a run is at work on it; None if it is to be."""
    if busy is not None:
        return f"{told(busy)}: left to it, and looked at again at the next tick"
    try:
        drafts = published_drafts(workspace.artifacts, workspace.registry.load_target(target))
    except DraftworksError as error:
        return str(error)
    return None if drafts else "none of its strategies has a draft yet: train one first"
