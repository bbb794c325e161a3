"""Files of a shared folder of features: names, publication, removal.

    root/store.json                                 identity of the store
    root/samples/{xxx}/{digest of key}.safetensors  one feature, complete and immutable
    root/staging/{host}~{pid}~{id}.tmp              being written; swept when old

A file's name is a digest of the feature's key, `xxx` its first three digits: no key, however hostile, is part of a path.
Stores of before, of schema 1, also have files `{digest}.g{generation}.safetensors`, of which the highest generation
counts; they are read and freed as the others.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.features.sample_file import require_seal, seal
from draftworks.features.shards import staging_name
from draftworks.storage.files import fsync, read_json
from draftworks.storage.identity import canonical_json

STORE_SCHEMA = "draftworks.shared-dir-store.2"
_SCHEMA_BEFORE = "draftworks.shared-dir-store.1"
STORE_FILE = "store.json"
_FILE_NAME = re.compile(r"([0-9a-f]{32})(?:\.g([1-9][0-9]{0,18}))?\.safetensors")


def sample_key(sample_id: str) -> str:
    return sha256(sample_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class SampleFolder:
    """Finds, publishes and removes the files of features below `root`, which it creates if absent.

    Attributes:
        store_id: the same for every machine, wherever each mounts the folder.

    Raises:
        StoreError: `root` cannot be such a folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._samples = self.root / "samples"
        self._staging = self.root / "staging"
        try:
            for folder in (self._samples, self._staging):
                folder.mkdir(parents=True, exist_ok=True)
            identity = self._agree_on_identity()
        except OSError as error:
            raise StoreError(f"{self.root} cannot be opened as a shared feature store: {error}") from error
        self.store_id = str(identity["store_id"])
        self._has_generations = identity["schema"] == _SCHEMA_BEFORE

    def path(self, key: str) -> Path:
        """Return where the feature of a key is published."""
        digest = sample_key(key)
        return self._samples / digest[:3] / f"{digest}.safetensors"

    def find(self, key: str) -> Path | None:
        """Return the file of a key; None if there is none."""
        path = self.path(key)
        if path.exists():
            return path
        return max(self._list_generations(key), key=_generation_of, default=None) if self._has_generations else None

    def list_files(self) -> dict[str, Path]:
        """Return the files by the digests of their keys."""
        found: dict[str, Path] = {}
        for path in sorted(self._samples.glob("*/*.safetensors"), key=_generation_of):
            match = _FILE_NAME.fullmatch(path.name)
            if match is not None:
                found[match[1]] = path
        return found

    @contextmanager
    def stage(self) -> Iterator[Path]:
        """Context with a path to write to; what is left there at exit is removed."""
        path = self._staging / staging_name()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def publish(self, staged: Path, final: Path) -> bool:
        """Make a synced file appear as `final`; return False if another process made that name appear first.

        A hard link, unlike a rename, never replaces: of two writers of one name exactly one succeeds, and knows it.
        """
        if not final.parent.exists():
            final.parent.mkdir(exist_ok=True)
            fsync(final.parent.parent)
        try:
            os.link(staged, final)
        except FileExistsError:
            # NFS repeats a request whose answer was lost, so the existing name may be this process's own link.
            if not os.path.samefile(staged, final):
                return False
        fsync(final.parent)
        return True

    def remove(self, digest: str) -> int:
        """Remove the files of the key that has a digest; return the bytes freed."""
        folder = self._samples / digest[:3]
        older = folder.glob(f"{digest}.g*.safetensors") if self._has_generations else ()
        return sum(map(remove, (folder / f"{digest}.safetensors", *older)))

    def staging_files(self) -> list[Path]:
        return list(self._staging.iterdir())

    def _list_generations(self, key: str) -> list[Path]:
        digest = sample_key(key)
        return list((self._samples / digest[:3]).glob(f"{digest}.g*.safetensors"))

    def _agree_on_identity(self) -> dict[str, Any]:
        """Return the store's identity, written by the first process."""
        path = self.root / STORE_FILE
        if not path.exists():
            identity = {"schema": STORE_SCHEMA, "store_id": uuid.uuid4().hex, "sealed_by": "sha256"}
            sealed = {**identity, "seal": seal(canonical_json(identity).encode())}
            with self.stage() as staged:
                staged.write_text(json.dumps(sealed, indent=2) + "\n")
                fsync(staged)
                self.publish(staged, path)
        try:
            identity = read_json(path)
            found, kind = str(identity.pop("seal")), str(identity["sealed_by"])
            known = identity["schema"] in (STORE_SCHEMA, _SCHEMA_BEFORE) and str(identity["store_id"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} cannot be read ({error!r}): it is truncated or altered") from error
        if not known:
            raise StoreError(f"{path} has schema {identity['schema']!r}, expected {STORE_SCHEMA!r}")
        require_seal(kind, found, canonical_json(identity).encode(), str(path))
        return identity


def _generation_of(path: Path) -> int:
    """Return the generation in a file's name; above all others for a file that has none."""
    match = _FILE_NAME.fullmatch(path.name)
    return int(match[2]) if match is not None and match[2] else 1 << 63


def age_s(path: Path) -> float:
    """Return the seconds since a file was last written; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def file_size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def remove(path: Path) -> int:
    """Remove a file, which another process may do at the same time; return the bytes freed."""
    size = file_size(path)
    with suppress(FileNotFoundError):
        path.unlink()
        return size
    return 0
