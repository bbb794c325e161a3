"""Which results are in use: the roots, and what they were made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftworks.retention.stored_results import StoredResult
from draftworks.storage.asset_names import TRAINING_FEATURES

ReadScore = Callable[[StoredResult], float | None]


@dataclass(frozen=True)
class UsedResults:
    """Results in use, with the reason.

    Attributes:
        reasons: by folder: "current", "best", "pinned", "in service"; or "made into ASSET DIGEST" for what a result in
            use was made from.
    """

    reasons: Mapping[Path, str] = field(default_factory=dict)

    def __contains__(self, result: StoredResult) -> bool:
        return result.path in self.reasons


def find_used(
    results: Sequence[StoredResult], roots: Mapping[Path, str], alone: Mapping[Path, str] | None = None
) -> UsedResults:
    """Return the results in `roots`, and all that they were made from, directly or not.

    A result refers to another of the same target if its identity mentions one of the other's names. A draft's identity
    has a digest over its streams instead of the name of its features: it refers to all features of its tokens and target.

    Args:
        roots: reason by folder.
        alone: reason by folder of results that are kept without what they were made from.
    """
    by_target: defaultdict[str, list[StoredResult]] = defaultdict(list)
    for result in results:
        by_target[result.target].append(result)
    reasons: dict[Path, str] = {}
    for one in by_target.values():
        index = _Index.of(one)
        waiting = [result for result in one if result.path in roots]
        reasons.update((result.path, roots[result.path]) for result in waiting)
        while waiting:
            user = waiting.pop()
            for used in index.find_used_by(user):
                if used.path not in reasons:
                    reasons[used.path] = f"made into {user.asset} {user.digest}"
                    waiting.append(used)
    for result in results:
        if alone is not None and result.path in alone:
            reasons.setdefault(result.path, alone[result.path])
    return UsedResults(reasons)


def find_best(reports: Iterable[StoredResult], read_score: ReadScore) -> dict[Path, str]:
    """Return, as roots, the report with the highest score of each asset and target; of equal ones the earliest.

    Args:
        read_score: reads the main score of a report; None if it has none that can be read.
    """
    groups: defaultdict[tuple[str, str], list[StoredResult]] = defaultdict(list)
    for report in reports:
        groups[report.asset, report.target].append(report)
    best: dict[Path, str] = {}
    for group in groups.values():
        if len(group) == 1:
            best[group[0].path] = "best"  # without reading it: it is current, or all that is left
            continue
        scored = [(score, -each.created, each.path) for each in group if (score := read_score(each)) is not None]
        if scored:
            best[max(scored)[2]] = "best"
    return best


@dataclass(frozen=True)
class _Index:
    """Results of one target by their names, and the sets of training features by what they were made from."""

    named: Mapping[str, Sequence[StoredResult]]
    features: Mapping[tuple[object, object], Sequence[StoredResult]]

    @classmethod
    def of(cls, results: Iterable[StoredResult]) -> _Index:
        named: defaultdict[str, list[StoredResult]] = defaultdict(list)
        features: defaultdict[tuple[object, object], list[StoredResult]] = defaultdict(list)
        for result in results:
            for name in result.names:
                named[name].append(result)
            if result.asset == TRAINING_FEATURES:
                features[result.made_from].append(result)
        return cls(dict(named), dict(features))

    def find_used_by(self, user: StoredResult) -> Iterator[StoredResult]:
        for text in user.mentions:
            yield from self.named.get(text, ())
        yield from self.features.get(user.made_from, ())
