"""Corrections of the budget's ledger by the runs in Dagster: what they have taken, and what has become of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from draftworks.decision.budget import HOUR_S, WEEK_S, Correction, Entry, Ledger, Outcome

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
    """Compare open charges, and those that were withdrawn in the last week, with their runs."""
    watched = [entry for entry in ledger.entries.values() if entry.is_open or _may_come(entry, now)]
    records = find_records(instance, [entry.charge.id for entry in watched])
    corrections: list[Correction] = []
    unsubmitted: set[str] = set()
    for entry in watched:
        record = records.get(entry.charge.id)
        if record is not None:
            corrections += correct_by_run(entry, record, now)
        elif entry.run is not None and entry.is_open:  # its record was deleted: what it took is not known
            corrections.append(Correction(entry.charge.id, entry.hours, now, Outcome.FAILED))
        elif entry.is_open:
            unsubmitted.add(entry.charge.id)
    return Settlement(tuple(corrections), frozenset(unsubmitted))


def _may_come(entry: Entry, now: float) -> bool:
    return entry.outcome is Outcome.WITHDRAWN and entry.at > now - WEEK_S


def find_records(instance: dg.DagsterInstance, charges: Sequence[str]) -> Mapping[str, dg.RunRecord]:
    """Return the newest run of each charge that has one."""
    if not charges:
        return {}
    records = instance.get_run_records(dg.RunsFilter(tags={CHARGE_TAG: list(charges)}), ascending=True)
    return {record.dagster_run.tags[CHARGE_TAG]: record for record in records}


def correct_by_run(entry: Entry, record: dg.RunRecord, now: float) -> list[Correction]:
    """Return the correction of a charge by its run; none if nothing has changed."""
    run = record.dagster_run
    ended = (record.end_time or now) if run.is_finished else now
    taken = 0.0 if record.start_time is None else max(ended - record.start_time, 0.0) / HOUR_S * entry.charge.ranks
    if run.is_finished:
        outcome = Outcome.SUCCEEDED if run.is_success else Outcome.FAILED
        return [Correction(entry.charge.id, taken, ended, outcome, run.run_id)]
    hours = entry.charge.hours if entry.outcome is Outcome.WITHDRAWN else entry.hours
    if entry.is_open and entry.run is not None and taken <= entry.hours:
        return []
    return [Correction(entry.charge.id, taken * BEYOND if taken > hours else hours, now, Outcome.OPEN, run.run_id)]
