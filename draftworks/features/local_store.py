"""A feature store in a folder: `shards/*.safetensors`, indexed by their headers alone.

    root/shards/{digest}.safetensors    complete and immutable
    root/staging/{host}~{pid}~{id}.tmp  being written; swept by `gc` once its writer is dead

Any number of processes may read and write one store at a time: a shard appears by rename, named by its content.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef
from draftworks.features.leases import LeaseTable
from draftworks.features.shards import ShardHeader, ShardReader, ShardWriter, read_header, staging_owner_is_dead
from draftworks.features.specs import dtype_name, fill_in_ref, require_spec

if TYPE_CHECKING:
    from torch import Tensor

FOREIGN_STAGING_AGE_S = 24 * 3600.0
"""Age at which a staging file of another host counts as crashed; its process cannot be checked from here."""


@dataclass(frozen=True)
class StoreCheck:
    """Result of reading every byte of a store: one message per bad file."""

    shards: int
    tensors: int
    nbytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class LocalFeatureStore(KeyedFeatureStore):
    """Features in sharded safetensors under `root`, memory-mapped, one key lookup per tensor. Thread-safe.

    Args:
        root: created if absent.
        verify_reads: compare each tensor's checksum on its first read.
        shard_bytes: `put` publishes a shard once it holds this much.
        max_open: shards kept mapped.
        max_hold_age_s: leases older than this are dropped by `gc`.
    """

    lease_bound = False

    def __init__(
        self,
        root: Path,
        verify_reads: bool = True,
        shard_bytes: int = 256 << 20,
        max_open: int = 64,
        max_hold_age_s: float = 3600.0,
    ) -> None:
        self.root = root.resolve()
        self._shards = self.root / "shards"
        self._staging = self.root / "staging"
        for folder in (self._shards, self._staging):
            folder.mkdir(parents=True, exist_ok=True)
        self._verify = verify_reads
        self._writer = ShardWriter(self._shards, self._staging, shard_bytes)
        self._reader = ShardReader(max_open)
        self._headers: dict[Path, ShardHeader] = {}
        self._damaged: dict[Path, str] = {}
        self._where: dict[str, ShardHeader] = {}
        self._wanted_by: dict[str, set[str]] = {}
        self._leases = LeaseTable(max_hold_age_s)
        self._lock = RLock()
        self.refresh()

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Store tensors by feature name. A key that is stored already is not stored again.

        Tensors are buffered; they are on disk after the shard is full or after `flush`.
        """
        with self._lock:
            for name, tensor in tensors.items():
                key = ref.feature_keys[name]
                if key not in self._where:
                    self._writer.add(key, tensor)
                    self._wanted_by.setdefault(key, set()).add(ref.sample_id)
            if self._writer.full:
                self.flush()
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Return tensors by feature name: read-only views of the mapped file, valid beyond the lease."""
        tensors = {name: self._fetch(ref, name, key) for name, key in ref.feature_keys.items()}
        with self._lock:
            return tensors, self._leases.grant(ref.sample_id, 0, ref.feature_keys.values())

    def release(self, handle: FeatureHandle) -> None:
        with self._lock:
            self._leases.end(handle)

    def abort(self, sample_id: str) -> None:
        """Discard what was put for a sample and is not published, and void its leases."""
        with self._lock:
            self._leases.void(sample_id)
            for key, samples in list(self._wanted_by.items()):
                samples.discard(sample_id)
                if not samples:
                    self._writer.discard(key)
                    del self._wanted_by[key]

    def gc(self) -> int:
        """Remove staging files of dead writers and leases that are too old; return the bytes freed."""
        with self._lock:
            self._leases.expire()
        return sum(_remove_if_crashed(path) for path in self._staging.iterdir())

    def health(self) -> dict[str, Any]:
        with self._lock:
            return {
                "root": str(self.root),
                "shards": len(self._headers),
                "tensors": len(self._where),
                "bytes": sum(header.nbytes for header in self._headers.values()),
                "unpublished_bytes": self._writer.nbytes,
                "leases": len(self._leases),
                "open_shards": self._reader.open_shards,
                "damaged": sorted(self._damaged.values()),
            }

    def estimate_bytes(self, ref: SampleRef) -> int:
        return sum(spec.nbytes for spec in ref.feature_specs.values())

    def contains(self, key: str) -> bool:
        """Whether a key is published or buffered."""
        with self._lock:
            return key in self._where or key in self._writer.tensors

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that are not stored, in the order given.

        Raises:
            StoreError: shards are damaged, so missing and damaged features cannot be told apart.
        """
        self.require_sound()
        return [key for key in keys if not self.contains(key)]

    def flush(self) -> None:
        """Publish what is buffered."""
        with self._lock:
            header = self._writer.publish()
            self._wanted_by.clear()
            if header is not None:
                self._admit(header)

    def refresh(self) -> None:
        """Read shards that others published, replaced or removed since; reads new and damaged headers only."""
        with self._lock:
            present = set(self._shards.glob("*.safetensors"))
            gone = self._headers.keys() - present
            for path in gone:
                for key in self._headers.pop(path).entries:
                    if self._where.get(key, None) is not None and self._where[key].path == path:
                        del self._where[key]
            self._damaged = {path: text for path, text in self._damaged.items() if path in present}
            for path in sorted((present - self._headers.keys()) | self._damaged.keys()):
                self._open_shard(path)

    def require_sound(self) -> None:
        """Raise StoreError that names every damaged shard, if there is one."""
        if self._damaged:
            raise StoreError("\n".join(text for _, text in sorted(self._damaged.items())))

    def verify(self) -> StoreCheck:
        """Read every tensor of every shard and compare its checksum; report all bad files."""
        self.refresh()
        problems = dict(self._damaged)
        for header in self._headers.values():
            if header.path not in problems:
                message = _first_problem(header)
                if message:
                    problems[header.path] = message
        nbytes = sum(header.nbytes for header in self._headers.values())
        found = tuple(text for _, text in sorted(problems.items()))
        return StoreCheck(len(self._headers.keys() | problems.keys()), len(self._where), nbytes, found)

    def close(self) -> None:
        """Publish what is buffered and unmap all shards."""
        self.flush()
        self._reader.close()

    def _open_shard(self, path: Path) -> None:
        try:
            header = read_header(path)
            self._admit(header)
            header.require_complete()
        except FileNotFoundError:
            return
        except StoreError as error:
            self._damaged[path] = str(error)

    def _admit(self, header: ShardHeader) -> None:
        self._headers[header.path] = header
        self._damaged.pop(header.path, None)
        for key in header.entries:
            self._where.setdefault(key, header)

    def _fetch(self, ref: SampleRef, name: str, key: str) -> Tensor:
        with self._lock:
            tensor = self._writer.tensors.get(key)
            header = self._where.get(key)
        if tensor is None:
            if header is None:
                raise StoreError(self._absent(ref, name, key))
            try:
                tensor = self._reader.get(header, key, self._verify)
            except StoreError as error:
                raise StoreError(f"sample {ref.sample_id}, feature {name}: {error}") from error
        where = f"sample {ref.sample_id}, feature {name}"
        require_spec(ref.feature_specs.get(name), tuple(tensor.shape), dtype_name(tensor), where)
        return tensor

    def _absent(self, ref: SampleRef, name: str, key: str) -> str:
        damaged = f" Damaged shards here: {'; '.join(self._damaged.values())}" if self._damaged else ""
        return (
            f"sample {ref.sample_id}, feature {name}: key {key} is not in the feature store {self.root}. "
            f"Capture the features again: only what is missing will be captured.{damaged}"
        )


def _remove_if_crashed(path: Path) -> int:
    try:
        stat = path.stat()
        dead = staging_owner_is_dead(path.name)
        if dead is None:
            dead = time.time() - stat.st_mtime > FOREIGN_STAGING_AGE_S
        if not dead:
            return 0
        path.unlink()
        return stat.st_size
    except FileNotFoundError:
        return 0


def _first_problem(header: ShardHeader) -> str | None:
    reader = ShardReader(max_open=1)
    try:
        for key in header.entries:
            reader.get(header, key, verify=True)
    except StoreError as error:
        return str(error)
    return None
