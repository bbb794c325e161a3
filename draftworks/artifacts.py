"""Where results live: `root/{asset}/{target}/{digest}/`, complete or absent, and `current.json` beside the digests.

A result is built in `{digest}.partial/`, which survives a crash so that the next attempt can continue in it, and becomes
visible by one rename. The digest is that of the *identity*: what went in. The data version says what came out.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from draftworks.errors import StoreError
from draftworks.identity import digest
from draftworks.publishing import fsync, fsync_tree, publish_json
from draftworks.specs import checked_name

SCHEMA_VERSION = 1
RECORD = "artifact.json"
POINTER = "current.json"


@dataclass(frozen=True)
class Built:
    """What a build says of its result: the version of its content, and figures worth keeping."""

    data_version: str
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A published result."""

    asset: str
    target: str
    path: Path
    identity: dict[str, Any]
    data_version: str
    summary: dict[str, Any]
    created: float
    seconds: float
    hit: bool = False
    """Whether this call found it already made."""


@dataclass(frozen=True)
class ArtifactStore:
    """All results below one root folder."""

    root: Path

    def obtain(
        self,
        asset: str,
        target: str,
        identity: dict[str, Any],
        build: Callable[[Path], Built],
        start_over: bool = False,
        still_good: Callable[[Artifact], bool] | None = None,
    ) -> Artifact:
        """The result of this identity: found, or built once and published atomically.

        Args:
            build: fills the folder it is given. What an interrupted attempt left there is still there.
            start_over: discard what an interrupted attempt left, and rebuild even what exists.
            still_good: asked of a result that exists, where it refers to something outside its folder; if it says no,
                the result is built again.

        Raises:
            StoreError: another process is building the same asset of the same target.
        """
        folder = self._folder(asset, target)
        final = folder / digest(identity)
        with self._locked(folder, asset, target):
            artifact = self._read(final, hit=True) if final.exists() and not start_over else None
            if artifact is None or (still_good is not None and not still_good(artifact)):
                artifact = self._build(final, asset, target, identity, build, start_over)
            publish_json(folder / POINTER, {"schema": SCHEMA_VERSION, "digest": final.name})
        return artifact

    def current(self, asset: str, target: str) -> Artifact:
        """The newest result of an asset for a target.

        Raises:
            StoreError: there is none, or it is damaged.
        """
        pointer = self._folder(asset, target) / POINTER
        try:
            name = json.loads(pointer.read_text())["digest"]
        except FileNotFoundError:
            raise StoreError(
                f"{asset} of target {target} does not exist yet: materialize it first ({pointer})"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{pointer}: not a pointer to a result: {error}. Materialize {asset} again") from error
        return self._read(pointer.parent / checked_name(name))

    def find(self, asset: str, target: str) -> Artifact | None:
        """As `current`, but None where there is no result."""
        return self.current(asset, target) if (self._folder(asset, target) / POINTER).exists() else None

    def _folder(self, asset: str, target: str) -> Path:
        return self.root / checked_name(asset) / checked_name(target)

    @contextmanager
    def _locked(self, folder: Path, asset: str, target: str) -> Iterator[None]:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(
                f"{asset} of target {target} is being materialized by another run (lock {folder / '.lock'}). "
                f"Wait for it, or cancel it; the lock goes with its process"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _build(
        self,
        final: Path,
        asset: str,
        target: str,
        identity: dict[str, Any],
        build: Callable[[Path], Built],
        start_over: bool,
    ) -> Artifact:
        partial = final.with_name(final.name + ".partial")
        if start_over:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        started = time.time()
        built = build(partial)
        record = {
            "schema": SCHEMA_VERSION,
            "asset": asset,
            "target": target,
            "identity": identity,
            "created": time.time(),
            "seconds": round(time.time() - started, 3),
            **asdict(built),
        }
        publish_json(partial / RECORD, record)
        fsync_tree(partial)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        fsync(final.parent)
        return self._read(final)

    def _read(self, folder: Path, hit: bool = False) -> Artifact:
        try:
            record = json.loads((folder / RECORD).read_text())
            if record["schema"] != SCHEMA_VERSION:
                raise StoreError(f"{folder / RECORD}: schema {record['schema']}, expected {SCHEMA_VERSION}")
            return Artifact(
                asset=record["asset"],
                target=record["target"],
                path=folder,
                identity=record["identity"],
                data_version=record["data_version"],
                summary=record["summary"],
                created=record["created"],
                seconds=record["seconds"],
                hit=hit,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{folder}: not a complete result ({error}). Delete the folder and materialize again"
            ) from error
