"""The sensor that starts the trainings that decisions call for, within the budget, and says why others wait."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from draftworks.decision.budget import HOUR_S, Correction, Entry, Ledger, Outcome
from draftworks.decision.fleet_state import FleetReader, Outdated
from draftworks.decision.queue import Action, FleetState, Step
from draftworks.decision.record import Choice, Decision
from draftworks.errors import DraftworksError
from draftworks.storage.names import of_strategy
from draftworks.storage.words import format_count
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import describe_new_strategy
from jobs.standard import name_training_job
from resources.workspace import Workspace
from sensors.reevaluation import BECAUSE_TAG
from sensors.running_targets import SeriesCursor, describe_run, find_runs_under_way

CHARGE_TAG = "draftworks/charge"
"""Names the charge of a run that a decision started."""
BEYOND = 1.1
"""An open run that takes more than its charge is charged so many times what it took, so that there are few corrections."""


@dataclass(frozen=True)
class Settlement:
    """What the runs say about a ledger.

    Attributes:
        corrections: to be written.
        unsubmitted: ids of open charges without a run: the process that charged them ended before it submitted them.
    """

    corrections: tuple[Correction, ...]
    unsubmitted: frozenset[str]


def settle(instance: dg.DagsterInstance, ledger: Ledger, now: float) -> Settlement:
    """Compare open charges, and those that ended in the last week, with their runs: one may have been executed again."""
    watched = [entry for entry in ledger.entries.values() if entry.counts_at(now)]
    records = find_records(instance, [entry.charge.id for entry in watched])
    corrections: list[Correction] = []
    unsubmitted: set[str] = set()
    for entry in watched:
        found = records.get(entry.charge.id)
        if found is not None:
            corrections += correct_by_runs(entry, found, now)
        elif entry.run is not None and entry.is_open:  # its record was deleted: what it took is not known
            corrections.append(Correction(entry.charge.id, entry.hours, now, Outcome.FAILED))
        elif entry.is_open:
            unsubmitted.add(entry.charge.id)
    return Settlement(tuple(corrections), frozenset(unsubmitted))


def find_records(instance: dg.DagsterInstance, charges: Sequence[str]) -> Mapping[str, Sequence[dg.RunRecord]]:
    """Return the runs of each charge that has any, oldest first."""
    found: defaultdict[str, list[dg.RunRecord]] = defaultdict(list)
    if charges:
        for record in instance.get_run_records(dg.RunsFilter(tags={CHARGE_TAG: list(charges)}), ascending=True):
            found[record.dagster_run.tags[CHARGE_TAG]].append(record)
    return found


def correct_by_runs(entry: Entry, records: Sequence[dg.RunRecord], now: float) -> list[Correction]:
    """Return the correction of a charge by its runs, oldest first; none if nothing has changed."""
    newest = records[-1].dagster_run
    taken = [_measure_hours(record, now) * entry.charge.ranks for record in records]
    if newest.is_finished:
        if not entry.is_open and entry.run == newest.run_id:
            return []
        outcome = Outcome.SUCCEEDED if newest.is_success else Outcome.FAILED
        ended = records[-1].end_time or now
        return [Correction(entry.charge.id, math.fsum(taken), ended, outcome, newest.run_id)]
    if entry.is_open and entry.run == newest.run_id and math.fsum(taken) <= entry.hours:
        return []
    expected = math.fsum(taken[:-1]) + entry.charge.hours
    hours = expected if math.fsum(taken) <= expected else math.fsum(taken) * BEYOND
    return [Correction(entry.charge.id, hours, now, Outcome.OPEN, newest.run_id)]


def _measure_hours(record: dg.RunRecord, now: float) -> float:
    """Return the wall hours of a run until it ended, or until now; 0 for one that never began to work."""
    if record.start_time is None:
        return 0.0
    ended = record.end_time if record.dagster_run.is_finished else now
    return max((ended or now) - record.start_time, 0.0) / HOUR_S


INTERVAL_S = 60
DO_NOT_COUNT = ("resolve", "serve")
"""Jobs that may run at the same time as a training of the same target."""


def make_decision_sensors(
    registry: Registry, jobs: Sequence[Any], strategies: Collection[str]
) -> list[dg.SensorDefinition]:
    """Return the sensor, on where the deployment has a budget; none without a strategy that has a decision.

    Args:
        jobs: `tune_`, `retrain_` and `decide_{strategy}`, see `jobs.standard`.
        strategies: those that have these jobs.
    """
    if not jobs:
        return []
    status = dg.DefaultSensorStatus.STOPPED
    if registry.load_deployment().budget is not None:
        status = dg.DefaultSensorStatus.RUNNING

    @dg.sensor(
        name="decision_sensor",
        jobs=jobs,
        minimum_interval_seconds=INTERVAL_S,
        default_status=status,
        description="Starts the trainings that decisions call for, within the budget: see docs/how-to/decisions.md.",
    )
    def act(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult:
        cursor = SeriesCursor.read(context.cursor)
        try:
            tick = Tick(FleetReader(workspace.registry), context.instance, time.time(), strategies)
            steps, requests = tick.act()
            again = tick.request_decisions(cursor)
        except DraftworksError as error:
            context.log.error(str(error))
            return dg.SensorResult(skip_reason=f"nothing is started: {error}")
        for line in tick.damaged:
            context.log.warning(line)
        for line in group_reasons(steps):
            context.log.info(line)
        requests += again
        return dg.SensorResult(
            run_requests=requests,
            cursor=cursor.write(cursor.entries | {_name(request): str(request.run_key) for request in again}),
            skip_reason=None if requests else explain_tick(steps),
        )

    return [act]


class Tick:
    """One look of the sensor: corrects the ledger, charges what starts, and requests its runs.

    Args:
        strategies: those whose jobs exist; None: all.
    """

    def __init__(
        self, reader: FleetReader, instance: dg.DagsterInstance, now: float, strategies: Collection[str] | None = None
    ) -> None:
        self._reader, self._now, self._strategies = reader, now, strategies
        # Before the results are read: what a run publishes during this tick is left to the next one.
        runs = find_runs_under_way(instance, DO_NOT_COUNT)
        self._busy = {target: describe_run(run) for target, run in runs.items()}
        file = reader.budget_file
        settlement = settle(instance, file.read(), now)
        file.correct(settlement.corrections)
        self._unsubmitted = settlement.unsubmitted
        state = reader.read(self._busy, without=settlement.unsubmitted)
        self._outdated = reader.find_outdated(state.decisions)
        self._state = replace(state, outdated={**self._explain_missing_jobs(state), **state.outdated})
        self.damaged = state.damaged

    def _has_jobs(self, strategy: str) -> bool:
        return self._strategies is None or strategy in self._strategies

    def _explain_missing_jobs(self, state: FleetState) -> dict[tuple[str, str], str]:
        """Return why no run can start for a decision, by target and strategy: no entry had a decision about the
        strategy when the code location was loaded."""
        keys = [(each.target, each.strategy) for each in state.decisions]
        return {key: describe_new_strategy(key[1]) for key in keys if not self._has_jobs(key[1])}

    def act(self) -> tuple[list[Step], list[dg.RunRequest]]:
        """Charge what starts now, and return all steps, and a request for each run that is charged.

        A charge without a run, of a tick that did not end, is requested again by its key, which Dagster never starts
        twice; if it is not called for any more it is withdrawn.
        """
        steps = self._reader.plan(self._state, self._now, self._outdated)
        starting = [step.charge for step in steps if step.charge is not None]
        file, budget = self._reader.budget_file, self._state.budget
        withdrawn = self._unsubmitted - {charge.id for charge in starting}
        file.correct([Correction(each, 0.0, self._now, Outcome.WITHDRAWN) for each in sorted(withdrawn)])
        new = [charge for charge in starting if charge.id not in self._unsubmitted]
        charged = set(self._unsubmitted)
        if new and budget is not None:
            charged |= {charge.id for charge in file.charge(new, budget.gpu_hours_per_week, self._now)}
        steps = [_take_back(step, charged) for step in steps]
        decisions = {(each.target, each.strategy): each for each in self._state.decisions}
        return steps, [
            request_training(step, decisions[step.target, step.strategy]) for step in steps if step.charge is not None
        ]

    def request_decisions(self, cursor: SeriesCursor) -> list[dg.RunRequest]:
        """Return requests to decide again, one for each state of drafts and reports."""
        return [
            request
            for (target, strategy), outdated in sorted(self._outdated.items())
            if target not in self._busy and self._has_jobs(strategy)
            for request in [request_decision(target, strategy, outdated, cursor)]
            if cursor.entries.get(_name(request)) != request.run_key
        ]


def _take_back(step: Step, charged: Collection[str]) -> Step:
    """Return a step that waits if another process has used the budget, or begun the same, since the ledger was read."""
    if step.charge is None or step.charge.id in charged:
        return step
    return replace(step, action=Action.WAIT, charge=None, reason="another process charged the budget: looked at again")


def request_training(step: Step, decision: Decision) -> dg.RunRequest:
    """Return the request for the run of a step; its key is the charge's id."""
    assert step.charge is not None
    config: dict[str, Any] = {}
    if step.choice is Choice.TUNE:
        config = {"ops": {of_strategy(step.strategy).draft: {"config": {"start_from": decision.draft}}}}
    return dg.RunRequest(
        run_key=step.charge.id,
        job_name=name_training_job(step.choice, step.strategy),
        partition_key=step.target,
        run_config=config,
        tags={
            CHARGE_TAG: step.charge.id,
            BECAUSE_TAG: f"decision {decision.number}: {step.choice}; {step.reason}; {step.figures}",
        },
    )


def request_decision(target: str, strategy: str, outdated: Outdated, cursor: SeriesCursor) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=cursor.name_run(target, strategy, outdated.facts),
        job_name=f"decide_{strategy}",
        partition_key=target,
        tags={BECAUSE_TAG: outdated.reason},
    )


def _name(request: dg.RunRequest) -> str:
    return f"{request.partition_key}:{request.job_name}"


def group_reasons(steps: Sequence[Step]) -> list[str]:
    """Return a line for each reason, with all drafts that it holds for, in the order of the queue."""
    grouped: defaultdict[tuple[Action, str], list[str]] = defaultdict(list)
    for step in steps:
        hours = f" ({step.hours:.3g} GPU-hours)" if step.action is Action.START else ""
        grouped[step.action, step.reason].append(f"{step.target} {step.strategy}{hours}")
    return [f"{action}: {', '.join(names)}: {reason}" for (action, reason), names in grouped.items()]


def explain_tick(steps: Sequence[Step], most: int = 5) -> str:
    """Return why nothing starts: how many decisions wait for what."""
    waiting = group_reasons([step for step in steps if step.action in (Action.WAIT, Action.ASK)])
    kept = sum(step.action is Action.KEEP for step in steps)
    lines = [line if len(line) < 200 else f"{line[:197]}..." for line in waiting[:most]]
    more = [f"and {len(waiting) - most} other reasons, see the log"] if len(waiting) > most else []
    return "; ".join([*lines, *more, f"kept: {format_count(kept, 'draft')}"])
