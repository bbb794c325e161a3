"""The ledger of GPU-hours of trainings that decisions start: charges, corrections, the sum of a week.

    {var}/decisions/budget.jsonl   one event a line, see `draftworks.decision.record`

A training is charged with an estimate before its run is submitted, and corrected to what it took when the run ends. What
is used at a moment is the sum over trainings that have not ended, and over those that ended less than 7 days before. As
that counts the whole of each training that overlaps with the 7 days, it is at least what was computed in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from draftworks.decision.record import FOLDER, Choice, Hours, open_log
from draftworks.errors import StoreError
from draftworks.storage.event_log import EventLog

FILE = "budget.jsonl"
WEEK_S = 7 * 24 * 3600.0
HOUR_S = 3600.0
ROUNDING = 1e-9
"""Hours by which a sum may exceed the budget, since it is rounded."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]


class Outcome(StrEnum):
    """Outcome of a charged training."""

    OPEN = "open"
    """It waits or works; the charge is an estimate, or what it took so far if that is more."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """It failed, was ended by a person, or was killed."""
    WITHDRAWN = "withdrawn"
    """Its run was never started."""


@dataclass(frozen=True)
class Charge:
    """A training that is to be submitted.

    Attributes:
        id: digest of target, strategy, subject, choice and the number of such charges before it; the run's key.
        choice: `tune` or `retrain`.
        subject: of the decision that it comes of.
        hours: estimate, in GPU-hours.
        ranks: processes of the training; wall hours times these are GPU-hours.
        at: seconds since the epoch.
    """

    id: Text
    target: Text
    strategy: Text
    choice: Literal[Choice.TUNE, Choice.RETRAIN]
    subject: Text
    hours: Hours
    ranks: Annotated[int, Field(ge=1)]
    at: Seconds
    kind: Literal["charge"] = "charge"
    schema: Literal[1] = 1


@dataclass(frozen=True)
class Correction:
    """GPU-hours and outcome of a charged training.

    Attributes:
        at: when its run ended; for an open one when it was looked at.
        run: id of its run in Dagster, once there is one.
    """

    id: Text
    hours: Hours
    at: Seconds
    outcome: Outcome
    run: Text | None = None
    kind: Literal["correction"] = "correction"
    schema: Literal[1] = 1


_ADAPTER: TypeAdapter[Charge | Correction] = TypeAdapter(Annotated[Charge | Correction, Field(discriminator="kind")])


@dataclass(frozen=True)
class Entry:
    """A charge with its newest correction; `at` is the end of one that is not open."""

    charge: Charge
    hours: float
    at: float
    outcome: Outcome = Outcome.OPEN
    run: str | None = None

    @property
    def is_open(self) -> bool:
        return self.outcome is Outcome.OPEN

    def counts_at(self, now: float) -> bool:
        """Whether its hours are part of what is used at a moment."""
        return self.is_open or self.at > now - WEEK_S


@dataclass(frozen=True)
class Ledger:
    """All charges, in their order, by id."""

    entries: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[Charge | Correction]) -> Ledger:
        """Return the ledger after some events. Raises ValueError for those that contradict each other."""
        entries: dict[str, Entry] = {}
        for event in events:
            entries[event.id] = _apply(entries.get(event.id), event)
        return cls(entries)

    def add(self, *events: Charge | Correction) -> Ledger:
        """Return the ledger after further events."""
        entries = dict(self.entries)
        for event in events:
            entries[event.id] = _apply(entries.get(event.id), event)
        return Ledger(entries)

    def sum_hours(self, now: float) -> float:
        """Return the GPU-hours that are used of the week before `now`."""
        return math.fsum(entry.hours for entry in self.entries.values() if entry.counts_at(now))

    def list_open(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.is_open]

    def select(self, charges: Sequence[Charge], limit: float, now: float) -> list[Charge]:
        """Return the charges that may be added, in order: new ones, one at a time for each target, within `limit`."""
        used = self.sum_hours(now)
        busy = {entry.charge.target for entry in self.list_open()}
        chosen: list[Charge] = []
        for charge in charges:
            if charge.id in self.entries or charge.target in busy or used + charge.hours > limit + ROUNDING:
                continue
            used += charge.hours
            busy.add(charge.target)
            chosen.append(charge)
        return chosen


def _apply(entry: Entry | None, event: Charge | Correction) -> Entry:
    if isinstance(event, Charge):
        if entry is not None:
            raise ValueError(f"charge {event.id} is there twice")
        return Entry(event, event.hours, event.at)
    if entry is None:
        raise ValueError(f"a correction of charge {event.id}, which is not there")
    return Entry(entry.charge, event.hours, event.at, event.outcome, event.run or entry.run)


@dataclass(frozen=True)
class BudgetFile:
    """The ledger of a deployment, shared by processes and hosts."""

    var: Path

    @property
    def path(self) -> Path:
        return self.var / FOLDER / FILE

    def read(self) -> Ledger:
        """Return the ledger. Raises StoreError if its file is damaged."""
        return self._build(self._log.read())

    def charge(self, charges: Sequence[Charge], limit: float, now: float) -> list[Charge]:
        """Add the charges that fit into the budget, see `Ledger.select`, and return them. All or some first ones are
        added if the process is killed."""
        added = self._log.append(lambda events: self._build(events).select(charges, limit, now))
        return [event for event in added if isinstance(event, Charge)]

    def correct(self, corrections: Sequence[Correction]) -> None:
        """Add the corrections that change something.

        Raises:
            StoreError: there is no such charge.
        """
        if corrections:
            self._log.append(lambda events: self._select_corrections(events, corrections))

    def _select_corrections(
        self, events: Sequence[Charge | Correction], corrections: Sequence[Correction]
    ) -> list[Correction]:
        ledger, chosen = self._build(events), []
        for correction in corrections:
            try:
                after = ledger.add(correction)
            except ValueError as error:
                raise StoreError(f"{self.path}: {error}") from None
            if after != ledger:
                chosen.append(correction)
            ledger = after
        return chosen

    def _build(self, events: Iterable[Charge | Correction]) -> Ledger:
        try:
            return Ledger.of(events)
        except ValueError as error:
            raise StoreError(f"{self.path}: {error}. Restore the file from a backup, or remove that line") from None

    @property
    def _log(self) -> EventLog[Charge | Correction]:
        return open_log(self.path, _ADAPTER, "a ledger of GPU-hours")
