"""What may be removed, and which of it, so that every kind keeps to its budget."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.config.operations import RetentionSpec
from draftworks.config.run_files import StoreSpec
from draftworks.errors import ConfigError, StoreError
from draftworks.features.manifest import MANIFEST, REFS
from draftworks.service.register import FOLDER, InService, ServedDraft, ServiceRegister
from draftworks.storage.files import open_regular, read_json
from draftworks.storage.names import of_strategy
from draftworks.targets.feature_stores import list_stores
from draftworks.targets.gguf_store import list_models
from draftworks.targets.registry import Registry

if TYPE_CHECKING:
    from draftworks.features.contracts import StoredFile


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnusedFeatures:
    """Files of one store that no set in use names.

    Attributes:
        total: bytes of all files of the store.
    """

    store: StoreSpec
    files: tuple[StoredFile, ...]
    total: int

    @property
    def weights(self) -> str:
        """Digest of the target's weights."""
        return self.store.root.name


def find_unused_features(stores: Sequence[StoreSpec], used_sets: Iterable[Path]) -> list[UnusedFeatures]:
    """Return what may go from each store.

    Args:
        used_sets: folders of feature sets, of whichever target.

    Raises:
        StoreError: a set in use cannot be read, or a store is damaged: what it needs is not known then.
    """
    if not stores:
        return []
    from draftworks.features.open_store import open_store

    used: defaultdict[str, set[str]] = defaultdict(set)
    for folder in used_sets:
        used[_read_weights(folder)].update(_read_keys(folder))
    found: list[UnusedFeatures] = []
    for spec in stores:
        store = open_store(spec)
        try:
            files = tuple(store.find_unused(used[spec.root.name]))
            found.append(UnusedFeatures(spec, files, store.health()["bytes"]))
        finally:
            store.close()
    return found


def _read_weights(folder: Path) -> str:
    try:
        return str(read_json(folder / MANIFEST)["identity"]["target"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _describe_unreadable(folder, error) from error


def _read_keys(folder: Path) -> Iterator[str]:
    try:
        with open_regular(folder / REFS) as lines:
            for line in lines:
                yield from json.loads(line)["feature_keys"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _describe_unreadable(folder, error) from error


def _describe_unreadable(folder: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{folder}: a feature set in use cannot be read ({error}). Materialize it again; until then nothing is removed"
    )


FORMER = 2
"""Drafts that were in service before the present one and are kept, so that a rollback finds them."""


@dataclass(frozen=True)
class ServedResults:
    """Folders of results by the reason why they stay.

    Attributes:
        whole: drafts that servers use or may be told to use again, their exports and reports.
        reports: of all drafts that were ever in service: later ones are compared with the best of them.
    """

    whole: dict[Path, str]
    reports: dict[Path, str]


def list_served(var: Path) -> ServedResults:
    """Return what stays for the draft in service, its canary and the last two before it, of each target and strategy.

    Raises:
        StoreError: a record cannot be read. What servers use is not known then.
    """
    whole: dict[Path, str] = {}
    reports: dict[Path, str] = {}
    for folder in sorted((var / FOLDER).glob("*/*/")):
        register = ServiceRegister(var, folder.parent.name, folder.name)
        history = register.read_history()
        for draft in choose_drafts(history):
            whole.update(dict.fromkeys(list_results(var, register, draft), "in service"))
        reports.update((locate_report(var, register, record.draft), "of a former draft") for record in history)
    return ServedResults(whole, reports)


def choose_drafts(history: tuple[InService, ...]) -> list[ServedDraft]:
    """Return the draft in service, its canary, and the last `FORMER` other drafts before it."""
    if not history:
        return []
    present = history[-1]
    drafts = {present.draft.digest: present.draft}
    for record in reversed(history):
        if len(drafts) <= FORMER:
            drafts.setdefault(record.draft.digest, record.draft)
    canary = [] if present.canary is None else [present.canary.draft]
    return [*drafts.values(), *canary]


def list_results(var: Path, register: ServiceRegister, draft: ServedDraft) -> list[Path]:
    """Return the folders of a draft, its export, its report and its bundle."""
    made = var / of_strategy(register.strategy).draft / register.target / draft.digest
    bundle = [] if draft.bundle is None else [(var / draft.bundle.path).parent]
    return [made, var / draft.path, locate_report(var, register, draft), *bundle]


def locate_report(var: Path, register: ServiceRegister, draft: ServedDraft) -> Path:
    return var / of_strategy(register.strategy).report / register.target / draft.report


@dataclass(frozen=True)
class Place:
    """What a survey looks at.

    Attributes:
        targets: names in the registry. Results of other targets are in use only if they are pinned or in service.
        stores: feature stores.
        models: folders of GGUF files that the targets name, below `var`; None: what they name is not known, so all stay.
        now: seconds since the epoch.
    """

    var: Path
    settings: RetentionSpec
    targets: frozenset[str]
    stores: tuple[StoreSpec, ...] = ()
    models: frozenset[str] | None = None
    now: float = field(default_factory=time.time)

    @classmethod
    def of(cls, registry: Registry) -> Place:
        """Return the place of a registry as it is now.

        Raises:
            ConfigError: `deployment.yaml` cannot be read, or the registry has no targets, which would leave nothing in use.
        """
        targets = frozenset(registry.list_targets())
        if not targets:
            raise ConfigError(
                f"{registry.root}: expected a registry with targets, found none, so nothing would be in use"
            )
        settings = registry.load_deployment().retention
        models = list_models(registry)
        return cls(registry.resolve_var_folder(), settings, targets, tuple(list_stores(registry)), models)

    def is_old(self, newest: float, days: float | None = None) -> bool:
        return newest <= self.now - (self.settings.keep_days if days is None else days) * 86400


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
