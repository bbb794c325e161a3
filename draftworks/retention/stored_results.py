"""Every result in `var`, read from its record alone: name, what it was made from, bytes; and pins."""

from __future__ import annotations

import getpass
import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.storage.artifacts import LOCK, POINTER, RECORD, UNPUBLISHED, ArtifactStore
from draftworks.storage.files import publish_json, read_json
from draftworks.storage.names import require_name
from draftworks.storage.records import choose_name, read_names
from draftworks.storage.words import suggest_or_list

NO_RESULTS = frozenset(
    {
        *(
            "answers",
            "eval_cache",
            "feature_cache",
            "feature_store",
            "fleet",
            "leaderboard",
            "loop_cache",
            "object_store_notes",
        ),
        *(
            "decisions",
            "gguf",
            "in_service",
            "measurements",
            "observed",
            "pins",
            "plans",
            "rival_cache",
            "runs",
            "site",
            "storage",
            "streams",
            "target_checks",
            "weight_checks",
            "workers",
        ),
    }
)
"""Folders in `var` that hold no results."""
_KINDS = {"_draft": "drafts", "_report": "reports", "_serving": "reports", "_export": "exports", "_bundle": "exports"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredResult:
    """One published result.

    Attributes:
        names: digests by which identities of other results of the same target refer to it: that of its inputs, that of its
            content, those of its streams.
        mentions: every text in its identity; those that are names of another result refer to it.
        made_from: digests of training tokens and target; a draft refers to features that have both of its own.
        weights: digest of the target's weights; None if the identity has none.
        created: seconds since the epoch.
        seconds: how long it took to make.
        bytes_per_s: rate of a capture; None for other results, and where nothing had to be captured.
        is_current: whether it is the newest of its asset and target.
    """

    asset: str
    target: str
    path: Path
    names: frozenset[str]
    mentions: frozenset[str]
    made_from: tuple[Any, Any]
    weights: str | None
    created: float
    seconds: float
    bytes_per_s: float | None
    is_current: bool

    @property
    def digest(self) -> str:
        return self.path.name

    @property
    def kind(self) -> str:
        """drafts, reports, exports, or data for all that is made before them."""
        return next((kind for suffix, kind in _KINDS.items() if self.asset.endswith(suffix)), "data")


def list_asset_folders(var: Path, target: str | None = None) -> Iterator[Path]:
    """Yield the folders `var/ASSET/TARGET`, of one target or of all."""
    for asset in list_folders(var):
        if asset.name not in NO_RESULTS:
            folder = Path(asset.path)
            if target is None:
                yield from (Path(each.path) for each in list_folders(asset.path))
            elif (folder / target).is_dir():
                yield folder / target


def read_results(folder: Path) -> Iterator[StoredResult]:
    """Yield the results in a folder `var/ASSET/TARGET`; those whose record cannot be read are logged and left out."""
    current, asset, target = _read_pointer(folder), folder.parent.name, folder.name
    for entry in list_folders(folder):
        if entry.name == LOCK or entry.name.endswith(UNPUBLISHED):
            continue
        try:
            yield _read_result(entry, asset, target, entry.name == current)
        except FileNotFoundError:
            continue  # no result, or one that another process is removing
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s: its record cannot be read, so it is left alone (%s)", entry.path, error)


@dataclass(frozen=True)
class FolderSize:
    """Bytes of all files below a folder, and when the newest file or folder was written to (seconds since the epoch)."""

    nbytes: int
    newest: float


def measure_folder(path: Path) -> FolderSize:
    """Return the size of a file, or of a folder without what links lead to."""
    total, newest, folders = 0, 0.0, [os.fspath(path)]
    while folders:
        folder = folders.pop()
        with suppress(FileNotFoundError):  # another process removes it
            found = os.stat(folder, follow_symlinks=False)
            newest = max(newest, found.st_mtime)
            if not stat.S_ISDIR(found.st_mode):
                total += found.st_size
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        total, newest = total + found.st_size, max(newest, found.st_mtime)
    return FolderSize(total, newest)


def _read_result(entry: os.DirEntry[str], asset: str, target: str, is_current: bool) -> StoredResult:
    record = read_json(f"{entry.path}/{RECORD}")
    identity, summary = record["identity"], record["summary"]
    names = {
        entry.name,
        record["data_version"],
        summary.get("data_version"),
        *summary.get("stream_versions", {}).values(),
    }
    weights = identity.get("target")
    return StoredResult(
        asset=asset,
        target=target,
        path=Path(entry.path),
        names=frozenset(name for name in names if isinstance(name, str)),
        mentions=frozenset(_list_texts(identity)),
        made_from=(identity.get("tokens"), weights if isinstance(weights, str) else json.dumps(weights)),
        weights=weights if isinstance(weights, str) else None,
        created=float(record["created"]),
        seconds=float(record["seconds"]),
        bytes_per_s=_compute_rate(summary),
        is_current=is_current,
    )


def _compute_rate(summary: dict[str, Any]) -> float | None:
    captured, seconds = summary.get("captured_bytes"), summary.get("seconds")
    return captured / seconds if captured and seconds else None


def _list_texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _read_pointer(folder: Path) -> str | None:
    try:
        return read_json(folder / POINTER)["digest"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: not a pointer to a result (%s)", folder / POINTER, error)
        return None


def list_folders(path: str | Path) -> list[os.DirEntry[str]]:
    """Return the folders in a folder by name, without links; none where it is not there. No file is stat'ed."""
    try:
        with os.scandir(path) as entries:
            return sorted((each for each in entries if each.is_dir(follow_symlinks=False)), key=lambda each: each.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


FOLDER = "pins"
"""In `var`: `ASSET/TARGET/DIGEST.json` for each pin."""


@dataclass(frozen=True)
class Pin:
    """A result that is kept, with all that it was made from.

    Attributes:
        digest: of the result's identity: the name of its folder.
        when: seconds since the epoch.
    """

    asset: str
    target: str
    digest: str
    who: str
    why: str
    when: float

    @property
    def result(self) -> Path:
        """Its folder below `var`."""
        return Path(self.asset, self.target, self.digest)


def pin_result(artifacts: ArtifactStore, asset: str, target: str, digest: str | None, why: str) -> Pin:
    """Keep a result: that of a digest or its begin, by default the newest.

    Raises:
        StoreError: there is no such result.
    """
    _require_asset(artifacts.root, asset, target)
    if digest is None:
        digest = artifacts.load_current(asset, target).path.name
    try:
        digest = choose_name(digest, read_names(artifacts.list_all(asset, target)), "result")
    except StoreError as error:
        raise StoreError(f"{asset} of target {target}: {error}") from None
    pin = Pin(asset, target, digest, _name_user(), why, time.time())
    path = _locate(artifacts.root, pin.asset, pin.target, pin.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_json(path, {"schema": 1, **asdict(pin)})
    return pin


def unpin_result(var: Path, asset: str, target: str, digest: str) -> None:
    """Remove the pin of a result, by its digest or its begin. Raises StoreError if there is none."""
    _require_asset(var, asset, target)
    pinned = dict.fromkeys(path.stem for path in _locate(var, asset, target, "any").parent.glob("*.json"))
    try:
        _locate(var, asset, target, choose_name(digest, pinned, "pinned result")).unlink()
    except (FileNotFoundError, StoreError) as error:
        raise StoreError(f"{asset} {digest} of target {target} is not pinned: {error}") from None


def _require_asset(var: Path, asset: str, target: str) -> None:
    """Raise StoreError for an asset or target of which nothing was ever made, with the closest of those that were."""
    if (var / asset / target).is_dir():
        return
    assets = [path.name for path in var.glob("*/") if any(path.glob(f"*/*/{RECORD}"))]
    if asset not in assets:
        raise StoreError(f"no asset {asset[:40]!r} was made yet; {suggest_or_list(asset, assets)}")
    targets = [path.name for path in (var / asset).glob("*/")]
    raise StoreError(f"{asset} was not made for a target {target[:40]!r}; {suggest_or_list(target, targets)}")


def list_pins(var: Path) -> list[Pin]:
    """Return all pins.

    Raises:
        StoreError: a pin cannot be read. What it keeps is not known, so nothing can be removed safely.
    """
    return [_read(path) for path in sorted((var / FOLDER).glob("*/*/*.json")) if not path.name.startswith(".")]


def _read(path: Path) -> Pin:
    try:
        values = read_json(path)
        if values.pop("schema") != 1:
            raise ValueError("expected schema 1")
        pin = Pin(**values)
        if _locate(Path(), pin.asset, pin.target, pin.digest).parts != path.parts[-4:]:
            raise ValueError("it names another result than its path does")
        return pin
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: not a pin ({error}). Remove the file, or pin the result again") from error


def _locate(var: Path, asset: str, target: str, digest: str) -> Path:
    return var / FOLDER / require_name(asset) / require_name(target) / f"{require_name(digest)}.json"


def _name_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"
