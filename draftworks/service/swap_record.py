"""What became of a draft that a running server was to load: the counts before and after, and whether the server went back.

{var}/in_service/{target}/{strategy}/swaps/{number}.json    of the record of that number
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.evaluation.acceptance_length import SYMBOL, format_change, format_interval, format_length
from draftworks.service.register import InService, ServiceRegister
from draftworks.storage.event_log import MAX_RECORD_BYTES
from draftworks.storage.files import publish_json, read_json
from draftworks.storage.words import format_count

SWAPS = "swaps"


class Outcome(StrEnum):
    STAYS = "stays"
    """The server serves the draft, and accepts no less than before."""
    UNDECIDED = "undecided"
    """The server serves the draft; what was counted does not say whether it accepts less."""
    BACK = "back"
    """It accepted clearly less: the server serves the former draft, which is in service again."""
    FAILED = "failed"
    """The server does not serve the draft."""

    @property
    def serves(self) -> bool:
        return self in (Outcome.STAYS, Outcome.UNDECIDED)


@dataclass(frozen=True)
class ServedWindow:
    """What a server counted with one draft.

    Attributes:
        accepted_per_pass: None without a pass; `low` and `high` are its interval, None where there were too few readings.
        requests: that were answered.
    """

    accepted_per_pass: float | None
    low: float | None
    high: float | None
    passes: int
    requests: int
    seconds: float

    def describe(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({format_interval(self.low, self.high)})"
        counted = f"{format_count(self.requests, 'request')} ({self.passes:,} passes) in {self.seconds:,.0f} s"
        return f"{SYMBOL} {format_length(self.accepted_per_pass)}{interval} of {counted}"


@dataclass(frozen=True)
class SwapResult:
    """The outcome for one record.

    Attributes:
        number, draft: of the record.
        former: digest of the draft that was in service before; None if nothing was compared.
        when: ISO 8601 in UTC.
        detail: why, in words.
        difference, low, high: of accepted tokens per pass, after - before.
        margin: what the draft may lose.
    """

    number: int
    draft: str
    url: str
    outcome: Outcome
    when: str
    detail: str
    former: str | None = None
    before: ServedWindow | None = None
    after: ServedWindow | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None

    def describe(self) -> str:
        """Return the outcome in a line."""
        words = {
            Outcome.STAYS: f"{self.url} serves draft {self.draft}",
            Outcome.UNDECIDED: f"{self.url} serves draft {self.draft}, undecided",
            Outcome.BACK: f"{self.url} went back from draft {self.draft} to {self.former}",
            Outcome.FAILED: f"{self.url} does not serve draft {self.draft}",
        }
        said = f"{words[self.outcome]}: {self.detail}"
        if self.before is not None and self.after is not None:
            said += f"; before {self.before.describe()}; after {self.after.describe()}"
        if self.difference is not None:
            said += f"; {format_change(self.difference, self.low, self.high)}, allowed {-(self.margin or 0.0):+.3f}"
        return said


_RESULT = TypeAdapter(SwapResult)


def save_swap(register: ServiceRegister, result: SwapResult) -> None:
    publish_json(_locate(register, result.number), json.loads(json.dumps(asdict(result))))


def find_swap(register: ServiceRegister, record: InService) -> SwapResult | None:
    """Return what became of a record's draft in the server; None if it was not to load it, or has not yet."""
    path = _locate(register, record.number)
    found = _read(path) if path.exists() else None
    return found if found is not None and found.draft == record.draft.digest else None


def find_taken_back(register: ServiceRegister, draft: str) -> SwapResult | None:
    """Return the last outcome of a draft in the server, if it was that the server went back from it."""
    found = [each for each in _read_all(register) if each.draft == draft]
    last = max(found, key=lambda one: one.number, default=None)
    return last if last is not None and last.outcome is Outcome.BACK else None


def _read_all(register: ServiceRegister) -> Iterator[SwapResult]:
    for path in sorted((register.folder / SWAPS).glob("[0-9]*.json")):
        yield _read(path)


def _read(path: Path) -> SwapResult:
    try:
        return _RESULT.validate_python(read_json(path, MAX_RECORD_BYTES))
    except (OSError, ValueError, ValidationError) as error:
        raise StoreError(f"{path}: cannot be read ({str(error)[:300]}). Remove the file") from None


def _locate(register: ServiceRegister, number: int) -> Path:
    return register.folder / SWAPS / f"{number:08}.json"
