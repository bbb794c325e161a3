"""What may be removed, and which of it, so that every kind keeps to its budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftworks.retention.feature_use import UnusedFeatures


@dataclass(frozen=True)
class Item:
    """Something that nothing refers to.

    Attributes:
        kind: as in `RetentionSpec.budget_gb`.
        owner: its target; the digest of the weights for what targets of the same weights share; empty for a run.
        name: asset and digest, or what else a person calls it.
        path: its folder; the store's for features.
        seconds: what it took to make; infinite if nobody knows.
        newest: when it was last written to, in seconds since the epoch.
        why: why it may go.
        targets: those whose runs may use it: nothing is removed while one of them works.
        features: files of a feature store, which is opened to remove them; None: the folder itself goes.
    """

    kind: str
    owner: str
    name: str
    path: Path
    nbytes: int
    seconds: float
    newest: float
    why: str = ""
    targets: frozenset[str] = frozenset()
    features: UnusedFeatures | None = None

    @property
    def cost(self) -> float:
        """Seconds to make a byte of it again."""
        return self.seconds / max(self.nbytes, 1)


@dataclass(frozen=True)
class KindUse:
    """Bytes of one kind before and after a removal.

    Attributes:
        removable: of what nothing refers to and is old enough.
        budget: bytes that the kind may have; None: everything that is removable goes.
    """

    kind: str
    total: int
    removable: int
    removed: int
    budget: int | None

    @property
    def is_over(self) -> bool:
        """Whether what is left exceeds the budget: all of it is in use, or too young."""
        return self.budget is not None and self.total - self.removed > self.budget


@dataclass(frozen=True)
class RemovalPlan:
    items: tuple[Item, ...]
    kinds: tuple[KindUse, ...]

    @property
    def nbytes(self) -> int:
        return _sum_bytes(self.items)


def plan_removal(totals: Mapping[str, int], candidates: Iterable[Item], budgets: Mapping[str, int]) -> RemovalPlan:
    """Choose what to remove: of each kind the cheapest to make again first, until its bytes keep to its budget.

    Of equally cheap items the oldest goes first. A kind without a budget loses all of its candidates.

    Args:
        totals: bytes of each kind, in use or not.
        budgets: bytes by kind.
    """
    by_kind: defaultdict[str, list[Item]] = defaultdict(list)
    for item in candidates:
        by_kind[item.kind].append(item)
    chosen: list[Item] = []
    kinds: list[KindUse] = []
    for kind, total in sorted(totals.items()):
        found = by_kind[kind]
        going = _choose(found, total, budgets.get(kind))
        chosen += going
        kinds.append(KindUse(kind, total, _sum_bytes(found), _sum_bytes(going), budgets.get(kind)))
    return RemovalPlan(tuple(chosen), tuple(kinds))


def _choose(candidates: Iterable[Item], total: int, budget: int | None) -> Sequence[Item]:
    ordered = sorted(candidates, key=lambda item: (item.cost, item.newest, item.name))
    if budget is None:
        return ordered
    chosen: list[Item] = []
    for item in ordered:
        if total <= budget:
            break
        chosen.append(item)
        total -= item.nbytes
    return chosen


def _sum_bytes(items: Iterable[Item]) -> int:
    return sum(item.nbytes for item in items)
