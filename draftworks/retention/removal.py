"""Removes what a plan names, unless a run uses it by now."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.config.run_files import StoreSpec
from draftworks.retention.removable import Item, Place, RemovalPlan
from draftworks.retention.stored_results import list_asset_folders
from draftworks.retention.survey import survey
from draftworks.storage.artifacts import LOCK, REPLACED
from draftworks.storage.file_lock import try_lock
from draftworks.storage.files import remove

if TYPE_CHECKING:
    from draftworks.features.contracts import StoredFile


@dataclass(frozen=True)
class Removal:
    """What became of a plan.

    Attributes:
        removed: items, in the order of their removal.
        left: by item, why it was left.
        nbytes: bytes that are free now.
    """

    removed: tuple[Item, ...]
    left: dict[str, str]
    nbytes: int


def remove_items(
    plan: RemovalPlan,
    look_again: Callable[[], Place],
    busy: Collection[str] = (),
    report: Callable[[Item], None] = lambda _: None,
) -> Removal:
    """Remove the items of a plan that still may go.

    Runs of a target wait while its items are removed, and its items are left while a run holds a lock of it. A process
    that is killed here leaves results that are complete or absent, and folders that the next removal takes.

    Args:
        look_again: returns what to survey; called again once the targets' locks are held, so that a result that became
            current, was pinned or put into service since the plan was made is left.
        busy: targets with a run that is queued or works.
        report: called with each item that was removed.

    Raises:
        StoreError: what is in use cannot be told any more.
    """
    groups: defaultdict[frozenset[str], list[Item]] = defaultdict(list)
    for item in plan.items:
        groups[item.targets].append(item)
    removed: list[Item] = []
    left: dict[str, str] = {}
    freed = 0
    with ExitStack() as held:
        free: list[Item] = []
        var = look_again().var
        for targets, items in groups.items():
            reason = _find_run(targets, busy) or _take_locks(held, var, targets)
            if reason is None:
                free += items
            else:
                left.update((item.name, reason) for item in items)
        now = _Allowed.by(survey(look_again()).candidates if free else ())
        for item in free:
            nbytes = now.remove(item)
            if nbytes is None:
                left[item.name] = "it is in use now"
                continue
            freed += nbytes
            removed.append(item)
            report(item)
    return Removal(tuple(removed), left, freed)


def _find_run(targets: Collection[str], busy: Collection[str]) -> str | None:
    working = sorted(set(targets) & set(busy))
    return f"a run of target {working[0]} is queued or works" if working else None


def _take_locks(held: ExitStack, var: Path, targets: Collection[str]) -> str | None:
    """Hold the locks of all assets of some targets; return why not, with none of these held, if a run holds one."""
    with ExitStack() as taken:
        for target in sorted(targets):
            for folder in list_asset_folders(var, target):
                if taken.enter_context(try_lock(folder / LOCK)) is None:
                    return f"a run of target {target} makes {folder.parent.name}"
        held.push(taken.pop_all())
    return None


@dataclass(frozen=True)
class _Allowed:
    """What may go at this moment: folders, and files by the folder of their store."""

    folders: frozenset[Path]
    files: Mapping[Path, frozenset[StoredFile]]

    @classmethod
    def by(cls, candidates: Iterable[Item]) -> _Allowed:
        files: defaultdict[Path, set[StoredFile]] = defaultdict(set)
        folders = set()
        for item in candidates:
            if item.features is None:
                folders.add(item.path)
            else:
                files[item.path].update(item.features.files)
        return cls(frozenset(folders), {root: frozenset(found) for root, found in files.items()})

    def remove(self, item: Item) -> int | None:
        """Remove an item, or what of it may go; return the bytes, None if nothing of it may."""
        if item.features is not None:
            files = [file for file in item.features.files if file in self.files.get(item.path, ())]
            return _remove_features(item.features.store, files) if files else None
        if item.path not in self.folders:
            return None
        aside = item.path
        if not aside.name.endswith(REPLACED):  # a reader finds it whole or not at all
            aside = item.path.with_name(item.path.name + REPLACED)
            remove(aside)
            os.rename(item.path, aside)
        remove(aside)
        return item.nbytes


def _remove_features(spec: StoreSpec, files: Sequence[StoredFile]) -> int:
    from draftworks.features.open_store import open_store

    store = open_store(spec)
    try:
        return store.remove_files(files)
    finally:
        store.close()
