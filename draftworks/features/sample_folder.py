"""Files of a shared folder of samples: names, publication, newest generation, removal.

    root/store.json                                             identity of the store, and whether it needs a secret
    root/samples/{xxx}/{sample key}.g{generation}.safetensors   complete and immutable
    root/staging/{host}~{pid}~{id}.tmp                          being written; swept when old

A sample key is a digest of the sample's id, `xxx` its first three digits: no id, however hostile, is part of a path.
Generations are clock microseconds, and above the existing ones: a sample that was freed and put again never gets an old
number, and no counter has to be stored.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.features.sealing import AuthPolicy
from draftworks.features.shards import staging_name
from draftworks.storage.files import fsync, read_json
from draftworks.storage.identity import canonical_json

STORE_SCHEMA = "draftworks.shared-dir-store.1"
STORE_FILE = "store.json"
_FILE_NAME = re.compile(r"([0-9a-f]{32})\.g([1-9][0-9]{0,18})\.safetensors")


@dataclass(frozen=True)
class SampleLocation:
    """One generation of one sample."""

    sample_key: str
    generation: int

    @property
    def file_name(self) -> str:
        return f"{self.sample_key}.g{self.generation}.safetensors"

    @classmethod
    def parse(cls, file_name: str) -> SampleLocation | None:
        match = _FILE_NAME.fullmatch(file_name)
        return None if match is None else cls(match[1], int(match[2]))


def sample_key(sample_id: str) -> str:
    return sha256(sample_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class SampleFolder:
    """Finds, publishes and removes generations of samples below `root`, which it creates if absent.

    Attributes:
        store_id: the same for every machine, wherever each mounts the folder.

    Raises:
        StoreError: `root` cannot be such a folder, or was sealed otherwise than `policy` requires.
    """

    def __init__(self, root: Path, policy: AuthPolicy) -> None:
        self.root = root.resolve()
        self._samples = self.root / "samples"
        self._staging = self.root / "staging"
        try:
            for folder in (self._samples, self._staging):
                folder.mkdir(parents=True, exist_ok=True)
            self.store_id = self._agree_on_identity(policy)
        except OSError as error:
            raise StoreError(f"{self.root} cannot be opened as a shared feature store: {error}") from error

    def path(self, place: SampleLocation) -> Path:
        return self._samples / place.sample_key[:3] / place.file_name

    def newest(self, key: str) -> int:
        """Return the highest generation of a sample; 0 if there is none."""
        return max((place.generation for place in self._generations(key)), default=0)

    def next_place(self, key: str) -> SampleLocation:
        return SampleLocation(key, max(self.newest(key) + 1, time.time_ns() // 1000))

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

    def remove_below(self, key: str, generation: int) -> int:
        """Remove all generations of a sample below `generation`; return the bytes freed."""
        older = [place for place in self._generations(key) if place.generation < generation]
        return sum(remove(self.path(place)) for place in older)

    def set_aside(self, place: SampleLocation) -> Path:
        """Rename a generation's file to a staging name, which it may have no longer when it is removed; return its path."""
        aside = self._staging / staging_name()
        with suppress(FileNotFoundError):
            os.rename(self.path(place), aside)
        return aside

    def places(self) -> list[SampleLocation]:
        found = (SampleLocation.parse(path.name) for path in self._samples.glob("*/*.safetensors"))
        return [place for place in found if place is not None]

    def staging_files(self) -> list[Path]:
        return list(self._staging.iterdir())

    def _generations(self, key: str) -> list[SampleLocation]:
        try:
            names = os.listdir(self._samples / key[:3])
        except FileNotFoundError:
            return []
        places = (SampleLocation.parse(name) for name in names if name.startswith(key))
        return [place for place in places if place is not None]

    def _agree_on_identity(self, policy: AuthPolicy) -> str:
        """Return the store's id, written by the first process; its seal reveals a wrong secret before any read."""
        path = self.root / STORE_FILE
        if not path.exists():
            identity = {"schema": STORE_SCHEMA, "store_id": uuid.uuid4().hex, "sealed_by": policy.kind}
            sealed = {**identity, "seal": policy.seal(canonical_json(identity).encode())}
            with self.stage() as staged:
                staged.write_text(json.dumps(sealed, indent=2) + "\n")
                fsync(staged)
                self.publish(staged, path)
        try:
            identity = read_json(path)
            seal, kind, store_id = str(identity.pop("seal")), str(identity["sealed_by"]), str(identity["store_id"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} cannot be read ({error!r}): it is truncated or altered") from error
        if identity.get("schema") != STORE_SCHEMA:
            raise StoreError(f"{path} has schema {identity.get('schema')!r}, expected {STORE_SCHEMA!r}")
        policy.require(kind, seal, canonical_json(identity).encode(), str(path))
        return store_id


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
