"""Swaps the draft of a running vLLM: counts before, exchange, counts after, and the way back if they fell.

The server's own counters are read every few seconds while each draft serves. Accepted tokens per pass are compared as
`draftworks observe` compares them: over windows between readings, with intervals over blocks of them. The draft is taken
back only if the whole interval of (after - before) is below -margin. Everything else stays, and is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from draftworks.config.service import SwapSpec
from draftworks.errors import DraftworksError, EngineError
from draftworks.production.readings import (
    LEAST_WINDOWS,
    Reading,
    Window,
    compare_acceptance,
    estimate_acceptance,
    split_windows,
)
from draftworks.production.scrape import Address
from draftworks.servers.counters import PASSES, PROCESS_START, REQUESTS, VLLM_COUNTERS
from draftworks.service.promotion import Request, Service
from draftworks.service.register import InService, ServedDraft, locate_format
from draftworks.service.swap_record import Outcome, ServedWindow, SwapResult, find_swap, save_swap
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.words import format_count
from draftworks.vllm.exchange import exchange_draft

LOCK = ".swap.lock"
COUNTERS = replace(VLLM_COUNTERS, others={REQUESTS: "vllm:request_success_total", **VLLM_COUNTERS.others})
READ_S = 30.0
"""Time limit of one reading."""
ALREADY = "it did so before: nothing is compared"
UNCOMPARED = "nothing was in service before it that it could be compared with"
BY_HAND = "nothing is compared, as this was asked for"


@dataclass(frozen=True)
class Swapped:
    """The record that is in service after a swap, and the outcome; None if there was nothing to swap."""

    record: InService
    result: SwapResult | None


@dataclass(frozen=True)
class Clock:
    """Time, in seconds since the epoch, and how to wait."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def swap(
    service: Service,
    record: InService,
    who: str,
    tell: Callable[[str], None] = lambda _: None,
    clock: Clock = Clock(),
) -> Swapped:
    """Have the server of `service.swap` load the draft of the record in service; return what is in service then.

    Nothing is done twice for a record, but what failed; a canary changes no server. It takes as long as both windows do.

    Args:
        who: for the record of the way back.
        tell: called with a line about each step.
    """
    spec = service.settings.swap
    is_of_others = spec is not None and spec.strategy not in (None, record.strategy)
    if spec is None or is_of_others or record.canary is not None or record.action == "end_canary":
        return Swapped(record, None)
    busy = f"{spec.url} is being given another draft of {record.target}, {record.strategy}: waiting"
    with hold_lock(service.register.folder / LOCK, busy):
        now = service.register.find()
        if now is None or now.number != record.number:
            return Swapped(record if now is None else now, None)  # whoever replaced it swaps
        known = find_swap(service.register, record)
        if known is not None and known.outcome is not Outcome.FAILED:
            return Swapped(record, known)
        return _Swap(service, record, spec, who, tell, clock).run()


@dataclass(frozen=True)
class _Compared:
    """Both windows, and what they say."""

    outcome: Outcome
    detail: str
    before: ServedWindow
    after: ServedWindow
    difference: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class _Swap:
    """One swap, while its lock is held."""

    service: Service
    record: InService
    spec: SwapSpec
    who: str
    tell: Callable[[str], None]
    clock: Clock

    def run(self) -> Swapped:
        draft = self.record.draft
        try:
            new, former = self._locate(draft), self._find_former()
            if self._read_version() == draft.digest:
                return self._end(Outcome.UNDECIDED, ALREADY)
            before = [] if former is None else self._count(former.digest, "before")
            self._exchange(new, draft)
        except DraftworksError as error:
            return self._end(Outcome.FAILED, str(error))
        if former is None:
            detail = BY_HAND if self.record.action == "rollback" else UNCOMPARED
            return self._end(Outcome.STAYS if self.record.action == "rollback" else Outcome.UNDECIDED, detail)
        try:
            after = self._count(draft.digest, "after")
        except DraftworksError as error:
            return self._end(Outcome.UNDECIDED, f"its counters cannot be read any more: {error}", former=former.digest)
        found = judge(before, after, self.service.settings.margin)
        if found.outcome is Outcome.BACK:
            return self._go_back(former, found)
        return self._end(found.outcome, found.detail, found, former.digest)

    def _find_former(self) -> ServedDraft | None:
        """Return the draft before that of a promotion, with which it is compared; None if there is none."""
        if self.record.action != "promote" or self.record.rollback_to is None:
            return None
        goal = self.record.rollback_to
        former = next(one.draft for one in self.service.register.read_history() if one.number == goal)
        self._locate(former)  # before anything is changed: the way back leads there
        return former

    def _locate(self, draft: ServedDraft) -> Path:
        return locate_format(self.service.register.var, draft, self.spec.format)

    def _exchange(self, new: Path, draft: ServedDraft) -> None:
        exchange_draft(self.spec.url, new, Path(self.spec.folder), draft.digest, self.spec.timeout_s)
        self.tell(f"{self.spec.url} serves draft {draft.digest} now")

    def _read_version(self) -> str | None:
        """Return what the server says of its weights; None if it does not."""
        found = Address(self.spec.url, READ_S).fetch_object("/weight_info") or {}
        version = found.get("weight_version")
        return version if isinstance(version, str) else None

    def _count(self, draft: str, which: str) -> list[Window]:
        """Return the windows between readings until enough requests were answered, or the time is over.

        Raises:
            EngineError: the server could not be read twice in this time.
        """
        spec = self.spec
        self.tell(
            f"counting {which}: until {spec.requests:,} requests are answered by draft {draft}, {spec.seconds:g} s at most"
        )
        readings, end, problem = [self._read(draft)], self.clock.now() + spec.seconds, "no reading"
        windows: list[Window] = []
        while self.clock.now() < end:
            self.clock.sleep(spec.every_s)
            try:
                readings.append(self._read(draft))
            except EngineError as error:
                problem = str(error)
                continue
            windows = split_windows(readings)
            if count_requests(windows) >= spec.requests and count_used(windows) >= LEAST_WINDOWS:
                break
        if not windows:
            raise EngineError(f"its counters could not be read for {spec.seconds:g} s: {problem}")
        return windows

    def _read(self, draft: str) -> Reading:
        metrics = Address(self.spec.url, READ_S).fetch_metrics(
            COUNTERS, "is it vLLM, started without --disable-log-stats?"
        )
        counters = {name: metrics.read_counter(each) for name, each in COUNTERS.counters.items()}
        requests = COUNTERS.others[REQUESTS]
        counters[REQUESTS] = metrics.read_counter(requests) if requests in metrics else 0
        started = metrics.read_gauge(COUNTERS.others[PROCESS_START])
        instance = None if started is None else f"start {started:.3f}"
        return Reading(self.clock.now(), instance, draft, True, None, counters, None)

    def _go_back(self, former: ServedDraft, found: _Compared) -> Swapped:
        """Have the server load the former draft, and put that into service again."""
        now = self.service.register.find()
        if now is None or now.number != self.record.number:
            return self._end(
                Outcome.UNDECIDED, f"{found.detail}, but another draft is in service by now", found, former.digest
            )
        try:
            self._exchange(self._locate(former), former)
        except DraftworksError as error:
            detail = f"{found.detail}, and the server cannot go back to draft {former.digest}: {error}"
            return self._end(Outcome.UNDECIDED, detail, found, former.digest)
        done = self._end(Outcome.BACK, found.detail, found, former.digest)
        assert done.result is not None
        request = Request(self.who, f"served by {done.result.describe()}", self.record.draft.digest)
        back = self.service.rollback(request, former.digest)
        save_swap(
            self.service.register,
            replace(
                self._make_result(Outcome.STAYS, f"the server went back to it from draft {self.record.draft.digest}"),
                number=back.number,
                draft=former.digest,
            ),
        )
        return Swapped(back, done.result)

    def _end(self, outcome: Outcome, detail: str, found: _Compared | None = None, former: str | None = None) -> Swapped:
        result = replace(self._make_result(outcome, detail), former=former)
        if found is not None:
            counted = {name: getattr(found, name) for name in ("before", "after", "difference", "low", "high")}
            result = replace(result, margin=self.service.settings.margin, **counted)
        save_swap(self.service.register, result)
        return Swapped(self.record, result)

    def _make_result(self, outcome: Outcome, detail: str) -> SwapResult:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return SwapResult(self.record.number, self.record.draft.digest, self.spec.url, outcome, when, detail)


def judge(before: Sequence[Window], after: Sequence[Window], margin: float) -> _Compared:
    """Return what two series of windows say of the draft that served in the second one.

    Args:
        margin: accepted tokens per pass that it may accept less.
    """
    sides = _summarize(before), _summarize(after)
    compared = compare_acceptance(after, before)
    if compared is None:
        none = "before" if not sides[0].passes else "after"
        return _Compared(Outcome.UNDECIDED, f"no pass was counted {none} the exchange", *sides)
    interval = compared.interval
    if interval is None:
        least = min(map(count_used, (before, after)))
        detail = f"{format_count(least, 'window')} between readings with a pass, {LEAST_WINDOWS} are needed"
        return _Compared(Outcome.UNDECIDED, detail, *sides, compared.value)
    figures = (compared.value, interval.low, interval.high)
    if not interval.has_width:
        return _Compared(
            Outcome.UNDECIDED, "every window counted alike, so nothing shows how far others lie", *sides, *figures
        )
    if interval.high < -margin:
        return _Compared(Outcome.BACK, "it accepted clearly less", *sides, *figures)
    if interval.low >= -margin:
        return _Compared(Outcome.STAYS, "it accepts no less", *sides, *figures)
    return _Compared(Outcome.UNDECIDED, "the interval decides nothing: count more requests", *sides, *figures)


def count_requests(windows: Sequence[Window]) -> int:
    return sum(window.counts[REQUESTS] for window in windows)


def count_used(windows: Sequence[Window]) -> int:
    """Return how many windows have a pass."""
    return sum(bool(window.counts[PASSES]) for window in windows)


def _summarize(windows: Sequence[Window]) -> ServedWindow:
    found = estimate_acceptance(windows)
    low, high = (None, None) if found.interval is None else (found.interval.low, found.interval.high)
    return ServedWindow(found.value, low, high, found.passes, count_requests(windows), found.seconds)
