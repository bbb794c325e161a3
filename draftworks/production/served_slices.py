"""What requests accept now, by slice: beside the same draft's first hours, and beside what the report promised.

Intervals are over requests. Many requests are put into groups at random, whose sums are the observations: that changes
neither the estimate nor, but for chance, the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from draftworks.config.observation import ObservationSpec
from draftworks.evaluation.ladder.statistics import (
    DEFAULT_RESAMPLING,
    AcceptanceDifference,
    AcceptanceRatio,
    Interval,
    Resampling,
    adjust_by_holm,
    examine_difference,
    find_interval,
)
from draftworks.evaluation.report.slice_changes import resample_enough
from draftworks.production.promised import Promise, PromptAgreement, compare_prompts
from draftworks.production.request_log import COLUMNS, OTHER_DRAFT, OTHER_WEIGHTS, TEMPERATURE, RequestTable
from draftworks.production.standing import HOUR_S

LEAST_REQUESTS = 20
MOST_GROUPS = 480
_SEED = 0
Verdict = Literal["fell", "rose", "no clear change", "too few requests"]
FIRST_HOURS, WITH_ALL = "first hours", "with all"


@dataclass(frozen=True)
class ServedRatio:
    """Accepted tokens per pass over requests or prompts; no interval for fewer than LEAST_REQUESTS."""

    value: float
    interval: Interval | None
    count: int
    passes: int


@dataclass(frozen=True)
class ServedSlice:
    """The requests of one slice.

    Attributes:
        column, value: both empty for all requests.
        now: over the last hours; None without a request.
        first: over the first hours of the draft; None as long as they are not over.
        change: now minus first hours, or minus all of the first hours for a slice that they did not have (`compared`).
        p_value: after Holm's correction over all slices that were compared.
        promised: by the walk of the report, over prompts of the same slice; None if it has none.
        beside: now minus promised; None where either is too small.
    """

    column: str
    value: str
    now: ServedRatio | None
    first: ServedRatio | None = None
    change: AcceptanceDifference | None = None
    compared: str | None = None
    p_value: float | None = None
    verdict: Verdict = "too few requests"
    promised: ServedRatio | None = None
    beside: AcceptanceDifference | None = None

    @property
    def name(self) -> str:
        return f"{self.column} {self.value}" if self.column else "all requests"

    @property
    def certain_loss(self) -> float:
        """What the slice lost at least, by the interval of its change; by it fallen slices are ordered."""
        return 0.0 if self.change is None else -self.change.interval.high


@dataclass(frozen=True)
class ServedStanding:
    """What the requests to the drafts of one strategy say, by their own counts (rung 6, on the traffic that there was).

    Attributes:
        draft: of the newest request. The figures are of this draft alone.
        since, until: times of its first and last request.
        baseline_over: whether its first hours are over, so that there is something to compare with.
        slices: all requests first, then the slices that fell, what fell most for certain first, then the others.
        promise: None where the draft has no report that can be read; `problem` says why.
        prompts: requests of the eval set's own prompts; None if there are none.
        proposed: proposed tokens per pass of the last hours; None if servers do not say.
        sampled: share of the last hours' requests above temperature 0, or at one that is not known.
        apart: requests that are in no figure, by reason.
    """

    strategy: str
    draft: str
    since: float
    until: float
    baseline_over: bool
    slices: tuple[ServedSlice, ...]
    promise: Promise | None
    prompts: PromptAgreement | None
    proposed: float | None
    sampled: float
    apart: Mapping[str, int]
    problem: str = ""

    @property
    def fallen(self) -> list[ServedSlice]:
        """The slices that fell, what fell most for certain first."""
        return [each for each in self.slices if each.column and each.verdict == "fell"]


def find_newest_draft(table: RequestTable) -> str:
    """Return the draft of the newest request, of at least one."""
    return table.values["draft"][int(table.draft[np.argmax(table.time)])]


def select_newest(table: RequestTable) -> tuple[RequestTable, dict[str, int]]:
    """Return the requests of the newest request's draft and of each server's newest weights; and how many are not."""
    last = int(np.argmax(table.time))
    same_draft = table.draft == table.draft[last]
    servers = np.array([name.split("\n")[0] for name in table.values["weights"]], dtype=object)[table.weights]
    newest = np.zeros(len(table), dtype=bool)
    for server in set(servers.tolist()):
        own = (servers == server) & same_draft
        if own.any():
            newest |= own & (table.weights == table.weights[np.argmax(np.where(own, table.time, -np.inf))])
    apart = {OTHER_DRAFT: int((~same_draft).sum()), OTHER_WEIGHTS: int((same_draft & ~newest).sum())}
    return table.select(newest), {reason: count for reason, count in apart.items() if count}


@dataclass(frozen=True)
class _Hours:
    """The requests of the first and of the last hours, which share none; `over` once the first hours are."""

    first: RequestTable
    recent: RequestTable
    over: bool

    @classmethod
    def of(cls, table: RequestTable, hours: ObservationSpec) -> _Hours:
        begin, end = float(table.time.min()), float(table.time.max())
        early = table.time <= begin + hours.baseline_hours * HOUR_S
        late = table.time >= end - hours.recent_hours * HOUR_S
        over = not bool(early.all())
        return cls(table.select(early), table.select(late & ~early if over else late), over)


def assess_requests(
    strategy: str,
    requests: RequestTable,
    hours: ObservationSpec,
    promise: Promise | None = None,
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> ServedStanding:
    """Return the standing of a strategy by its requests, at least one. The last request is now, whenever that was."""
    table, others = select_newest(requests)
    parts = _Hours.of(table, hours)
    recent = parts.recent
    known = recent.drafted >= 0
    return ServedStanding(
        strategy=strategy,
        draft=find_newest_draft(requests),
        since=float(table.time.min()),
        until=float(table.time.max()),
        baseline_over=parts.over,
        slices=_assess_slices(parts, promise, resampling),
        promise=promise,
        prompts=None if promise is None else compare_prompts(table, promise, resampling),
        proposed=float(recent.drafted[known].sum() / recent.passes[known].sum()) if known.any() else None,
        sampled=float((~recent.find(TEMPERATURE, "0")).mean()),
        apart=others,
    )


def _assess_slices(parts: _Hours, promise: Promise | None, resampling: Resampling) -> tuple[ServedSlice, ...]:
    names = [("", ""), *_list_slices(parts)]
    enough = resample_enough(resampling, len(names))
    found = [_assess_slice(parts, column, value, promise, enough) for column, value in names]
    judged = [each for each in found[1:] if each.change is not None]
    adjusted = dict(
        zip([each.name for each in judged], adjust_by_holm([one.change.p_value for one in judged if one.change]))
    )
    whole, *slices = [_judge(each, adjusted.get(each.name), resampling.confidence) for each in found]
    fallen = sorted((each for each in slices if each.verdict == "fell"), key=lambda each: -each.certain_loss)
    return (whole, *fallen, *(each for each in slices if each.verdict != "fell"))


def _list_slices(parts: _Hours) -> list[tuple[str, str]]:
    """Return the slices of columns that have several values, by column and value."""
    found = []
    for column in COLUMNS:
        codes: set[int] = set(
            np.unique(np.concatenate([parts.first.columns[column], parts.recent.columns[column]])).tolist()
        )
        names = sorted(parts.recent.values[column][code] for code in codes)
        found += [(column, name) for name in names if len(names) > 1]
    return found


def _assess_slice(
    parts: _Hours, column: str, value: str, promise: Promise | None, resampling: Resampling
) -> ServedSlice:
    now, first = (_count(one, column, value) for one in (parts.recent, parts.first))
    compared = FIRST_HOURS
    before = first
    if parts.over and column and not len(first):
        compared, before = WITH_ALL, _count(parts.first, "", "")
    change = _compare(now, before, resampling) if parts.over else None
    promised = promise.count(column or None, value) if promise is not None else np.zeros((0, 2))
    return ServedSlice(
        column=column,
        value=value,
        now=_measure(now, resampling),
        first=_measure(first, resampling) if parts.over else None,
        change=change,
        compared=None if change is None else compared,
        promised=_measure(promised, resampling),
        beside=_compare(now, promised, resampling),
    )


def _judge(found: ServedSlice, p_value: float | None, confidence: float) -> ServedSlice:
    """Return the slice with its verdict; all requests together are judged by their own p-value."""
    change = found.change
    if change is None:
        return found
    p_value = change.p_value if p_value is None else p_value
    clear = p_value <= 1 - confidence and change.difference != 0
    verdict: Verdict = "no clear change" if not clear else "fell" if change.difference < 0 else "rose"
    return replace(found, p_value=p_value, verdict=verdict)


def _count(table: RequestTable, column: str, value: str) -> np.ndarray:
    """Return passes and accepted tokens of the requests of a slice, float64 (requests, 2)."""
    found = table.select(table.find(column, value)) if column else table
    return np.stack([found.passes, found.accepted], axis=1).astype(np.float64)


def _group(counts: np.ndarray) -> np.ndarray:
    """Return the counts of at most MOST_GROUPS observations, (observations, 2): many are summed in random groups."""
    if len(counts) <= MOST_GROUPS:
        return counts
    groups = np.random.default_rng(_SEED).permutation(len(counts)) % MOST_GROUPS
    return np.stack([np.bincount(groups, weights=counts[:, each], minlength=MOST_GROUPS) for each in (0, 1)], axis=1)


def _measure(counts: np.ndarray, resampling: Resampling) -> ServedRatio | None:
    if not len(counts):
        return None
    ratio = _find_ratio(counts)
    enough = len(counts) >= LEAST_REQUESTS
    interval = find_interval(ratio.value, [ratio.influences], resampling) if enough else None
    return ServedRatio(ratio.value, interval, len(counts), int(counts[:, 0].sum()))


def _compare(now: np.ndarray, before: np.ndarray, resampling: Resampling) -> AcceptanceDifference | None:
    if min(len(now), len(before)) < LEAST_REQUESTS:
        return None
    left, right = _find_ratio(now), _find_ratio(before)
    tested = examine_difference(left.value - right.value, [left.influences, -right.influences], resampling)
    return AcceptanceDifference(left.value, right.value, tested.interval, tested.p_value, len(now))


def _find_ratio(counts: np.ndarray) -> AcceptanceRatio:
    grouped = _group(counts)
    return AcceptanceRatio.of_counts(accepted=grouped[:, 1], passes=grouped[:, 0])
