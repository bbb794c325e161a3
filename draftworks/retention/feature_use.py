"""Features that no set in use names, store by store. Imports torch when a store is opened."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftworks.config.run_files import StoreSpec
from draftworks.errors import StoreError
from draftworks.features.manifest import MANIFEST, REFS
from draftworks.storage.regular_files import open_regular, read_json

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
