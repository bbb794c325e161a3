"""Corrections of the budget's ledger by the runs in Dagster: what they have taken, and what has become of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from draftworks.decision.budget import HOUR_S, Correction, Entry, Ledger, Outcome

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
