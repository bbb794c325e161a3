"""Features and answers that earlier versions stored under a target's name, reused in place. Torch-free.

They are now stored under the digest of the target's weights, so that a copy of a target, or a new name, shares them. Old
files are neither moved nor changed: an earlier version still finds them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.names import HELDOUT_FEATURES, TRAINING_FEATURES
from draftworks.storage.records import read_captured_weights

CAPTURED = (TRAINING_FEATURES, HELDOUT_FEATURES)
"""Assets whose records name the weights from which a target's features were captured."""
ADOPTED = "adopted"
"""Folder in a store with one file for each named store whose features were linked into it."""

log = logging.getLogger(__name__)


def find_store(root: Path, weights: str, target: str, artifacts: ArtifactStore) -> Path:
    """Return the feature store of a target's weights below `root`, after linking the named stores of these weights into it.

    The first named store becomes the store through one symbolic link; files of each further one are hard-linked into it, so
    that nothing is copied. Safe against crashes and against concurrent calls: the link is made last, so a process that
    finds the store finds the files of all stores that joined it then.

    Args:
        weights: digest of the target's weights.
        target: name of the target. Its named store is used unless it was linked into the store of other weights: it may hold
            files of an interrupted capture, which has no record.

    Raises:
        StoreError: `root` is not writable.
    """
    place = root / weights
    named = set() if place.is_dir() else _find_target_names(artifacts, weights)
    if _is_named_store(root / target) and not _is_adopted(root, target):
        named.add(target)
    stores = [root / name for name in sorted(named) if name != weights and _is_named_store(root / name)]
    if stores and not place.exists():
        for store in stores[1:]:
            _join_once(store, stores[0])
        _link_store(stores[0], place)
    for store in stores:
        if not place.samefile(store):
            _join_once(store, place)
    return place


def find_answers(root: Path, weights: str) -> list[Path]:
    """Return the files `root/{target}/{part}/{identity}.jsonl` of answers by these weights, under any target name."""
    return [path for path in sorted(root.glob("*/*/*.jsonl")) if _read_weights_digest(path) == weights]


def _find_target_names(artifacts: ArtifactStore, weights: str) -> set[str]:
    """Return the names of targets that have, or had, these weights."""
    found = set()
    for asset in CAPTURED:
        for folder in (artifacts.root / asset).glob("*/"):
            results = artifacts.list_all(asset, folder.name)
            if any(read_captured_weights(result) == weights for result in results):
                found.add(folder.name)
    return found


def _is_named_store(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()


def _is_adopted(root: Path, name: str) -> bool:
    linked = (os.readlink(path) for path in root.iterdir() if path.is_symlink())
    return name in linked or any(root.glob(f"*/{ADOPTED}/{name}"))


def _link_store(named: Path, place: Path) -> None:
    """Make `place` a link to a named store, unless another process has made it something already."""
    try:
        os.symlink(named.name, place, target_is_directory=True)
    except FileExistsError:
        return
    except OSError as error:
        raise StoreError(f"{place.parent}: expected a folder that this user may write to, found: {error}") from error
    log.info("the features in %s are used as %s", named, place)


def _join_once(named: Path, place: Path) -> None:
    """Join a named store to `place`, unless it was joined before: a file that was removed since does not come back."""
    if not (place / ADOPTED / named.name).exists():
        _join(named, place)


def _join(named: Path, place: Path) -> None:
    """Hard-link the complete files of a named store; both kinds of store write unfinished files elsewhere."""
    joined = 0
    try:
        for path in _feature_files(named):
            joined += _link(path, place / path.relative_to(named))
        (place / ADOPTED).mkdir(exist_ok=True)
        (place / ADOPTED / named.name).touch()
    except OSError as error:
        log.warning("the features in %s cannot be joined to %s, and may be captured again: %s", named, place, error)
        return
    log.info("%d files of features in %s are used as %s too", joined, named, place)


def _feature_files(store: Path) -> Iterator[Path]:
    yield from (store / "shards").glob("*.safetensors")
    yield from (store / "samples").glob("*/*.safetensors")


def _link(path: Path, to: Path) -> bool:
    """Hard-link a file; False if the name exists, which then has the same content, as names are content keys."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except FileExistsError:
        return False
    return True


def _read_weights_digest(path: Path) -> str | None:
    """Return the weights digest in the header of an answers file; None if it has none, and is therefore unusable."""
    try:
        with path.open("rb") as stream:
            return json.loads(stream.readline())["identity"]["target"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
