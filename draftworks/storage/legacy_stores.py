"""Features and answers that earlier versions kept below the name of a target: found, and used where they are. Torch-free.

Now they lie below the digest of the weights that they are of, so that a copy of a target, or a new name, has them too. Nothing
old is moved or changed: a version that still goes by names finds its files as it left them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.storage.artifacts import ArtifactStore

CAPTURED = ("training_features", "heldout_eval_features")
"""Assets whose records say of which weights the features of a target were."""
ADOPTED = "adopted"
"""Folder in a store: a file for each named store whose features it has taken in."""

log = logging.getLogger(__name__)


def find_store(root: Path, weights: str, target: str, artifacts: ArtifactStore) -> Path:
    """The folder of the features of some weights below `root`, with what is there of them under names.

    The first named store becomes it by one symbolic link, each further one is joined to it by hard links, so that nothing is
    copied. Safe against a crash, and against others who do the same at the same time.

    Args:
        weights: digest of the target's weights.
        target: the name by which it is asked for. Its named store counts, unless other weights have taken it in: it
            may hold what an interrupted capture left, of which there is no record.

    Raises:
        StoreError: `root` cannot be written to.
    """
    place = root / weights
    named = set() if place.is_dir() else _find_target_names(artifacts, weights)
    if _is_named_store(root / target) and not _is_adopted(root, target):
        named.add(target)
    for name in sorted(named):
        if name != weights and _is_named_store(root / name):
            _adopt(root / name, place)
    return place


def find_answers(root: Path, weights: str) -> list[Path]:
    """Files `root/{target}/{part}/{identity}.jsonl` of answers that these weights gave, whatever the target was called."""
    return [path for path in sorted(root.glob("*/*/*.jsonl")) if _read_weights_digest(path) == weights]


def _find_target_names(artifacts: ArtifactStore, weights: str) -> set[str]:
    """Names of targets that have, or had, these weights."""
    found = set()
    for asset in CAPTURED:
        for folder in (artifacts.root / asset).glob("*/"):
            results = artifacts.list_all(asset, folder.name)
            if any(result.identity.get("target") == weights for result in results):
                found.add(folder.name)
    return found


def _is_named_store(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()


def _is_adopted(root: Path, name: str) -> bool:
    linked = (os.readlink(path) for path in root.iterdir() if path.is_symlink())
    return name in linked or any(root.glob(f"*/{ADOPTED}/{name}"))


def _adopt(named: Path, place: Path) -> None:
    try:
        os.symlink(named.name, place, target_is_directory=True)
        log.info("the features in %s are used as %s", named, place)
        return
    except FileExistsError:
        if place.samefile(named) or (place / ADOPTED / named.name).exists():
            return
    except OSError as error:
        raise StoreError(f"{place.parent}: expected a folder that this user may write to, found: {error}") from error
    _join(named, place)


def _join(named: Path, place: Path) -> None:
    """Complete files only: what is being written lies elsewhere in both kinds of store."""
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
    """A file's name is its content, so one of that name is the same."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except FileExistsError:
        return False
    return True


def _read_weights_digest(path: Path) -> str | None:
    """The weights that a file of answers is of; None for one that does not say so, which nobody can use."""
    try:
        with path.open("rb") as stream:
            return json.loads(stream.readline())["identity"]["target"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
