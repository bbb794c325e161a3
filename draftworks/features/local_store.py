"""A feature store in a folder: `shards/*.safetensors`, indexed by their headers alone.

    root/shards/{digest}.safetensors    complete and immutable; removed when all its keys are freed
    root/shards/{digest}.freed          keys of the shard that were freed, see `freed_keys`
    root/staging/{host}~{pid}~{id}.tmp  being written; swept by `gc` once its writer is dead

Any number of processes may read and write one store at a time: a shard appears by rename, named by its content.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef, StoredFile
from draftworks.features.freed_keys import FreedKeys, JournalState
from draftworks.features.shards import (
    ShardHeader,
    ShardIndex,
    ShardReader,
    ShardWriter,
    read_header,
    staging_owner_is_dead,
)
from draftworks.features.store_parts import LeaseTable, dtype_name, fill_in_ref, require_spec

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
        keep_tensors: `put` buffers the tensors themselves, which nobody changes afterwards, and not copies of them.
    """

    lease_bound = False

    def __init__(
        self,
        root: Path,
        verify_reads: bool = True,
        shard_bytes: int = 256 << 20,
        max_open: int = 64,
        max_hold_age_s: float = 3600.0,
        keep_tensors: bool = False,
    ) -> None:
        self.root = root.resolve()
        self._shards = self.root / "shards"
        self._staging = self.root / "staging"
        for folder in (self._shards, self._staging):
            folder.mkdir(parents=True, exist_ok=True)
        self._verify = verify_reads
        self._journals = FreedKeys(self._shards)
        self._writer = ShardWriter(
            self._shards, self._staging, shard_bytes, self._journals.publishing, keep_tensors=keep_tensors
        )
        self._reader = ShardReader(max_open)
        self._index = ShardIndex()
        self._damaged: dict[Path, str] = {}
        self._journal_states: dict[Path, JournalState] = {}
        self._deferred: set[Path] = set()
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
                if not self._index.holders(key):
                    self._writer.add(key, tensor)
                    self._wanted_by.setdefault(key, set()).add(ref.sample_id)
            if self._writer.full:
                self.flush()
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Return tensors by feature name: read-only views of the mapped file, valid beyond the lease."""
        with self._lock:
            shards = {holders[0].path for holders in map(self._index.holders, ref.feature_keys.values()) if holders}
            handle = self._leases.grant(ref.sample_id, shards)
        try:
            return {name: self._fetch(ref, name, key) for name, key in ref.feature_keys.items()}, handle
        except BaseException:
            self.release(handle)
            raise

    def release(self, handle: FeatureHandle) -> None:
        """Return the lease; shards whose keys were all freed meanwhile go with the last one."""
        with self._lock:
            self._leases.end(handle)
            self._remove_emptied(self._deferred)

    def abort(self, sample_id: str) -> None:
        """Discard what was put for a sample and is not published, and void its leases."""
        with self._lock:
            self._leases.void(sample_id)
            self._remove_emptied(self._deferred)
            for key, samples in list(self._wanted_by.items()):
                samples.discard(sample_id)
                if not samples:
                    self._writer.discard(key)
                    del self._wanted_by[key]

    def gc(self) -> int:
        """Remove old leases, staging files of dead writers, and shards whose keys are all freed; return the bytes freed."""
        self.expire_leases()
        with self._lock:
            freed = self._remove_emptied(self._index.freed)
            self._journals.sweep()
        return freed + sum(_remove_if_crashed(path) for path in self._staging.iterdir())

    def expire_leases(self) -> None:
        """Drop the leases that are older than `max_hold_age_s`."""
        with self._lock:
            self._leases.expire()

    def health(self) -> dict[str, Any]:
        with self._lock:
            return {
                "root": str(self.root),
                "shards": len(self._index.headers),
                "tensors": self._index.num_keys,
                "bytes": self._index.nbytes,
                "freed_bytes": self._index.freed_bytes,
                "unpublished_bytes": self._writer.nbytes,
                "leases": len(self._leases),
                "open_shards": self._reader.open_shards,
                "damaged": sorted(self._damaged.values()),
            }

    def contains(self, key: str) -> bool:
        """Whether a key is published or buffered."""
        with self._lock:
            return bool(self._index.holders(key)) or key in self._writer.tensors

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that are not stored, in the order given.

        Raises:
            StoreError: shards are damaged, so missing and damaged features cannot be told apart.
        """
        self.require_sound()
        return [key for key in keys if not self.contains(key)]

    def free(self, keys: Iterable[str]) -> int:
        """Remove features by key; see `KeyedFeatureStore.free`. A shard's file goes when all its keys are freed."""
        freed: defaultdict[Path, set[str]] = defaultdict(set)
        headers: dict[Path, ShardHeader] = {}
        with self._lock:
            for key in keys:
                self._writer.discard(key)
                self._wanted_by.pop(key, None)
                for header in self._index.holders(key):
                    freed[header.path].add(key)
                    headers[header.path] = header
            for path, names in freed.items():
                self._journals.record(path, names)
                self._index.add(headers[path], self._journals.read(path))  # with what others have freed
            return self._remove_emptied(freed)

    def find_unused(self, used: Collection[str]) -> list[StoredFile]:
        self.refresh()
        self.require_sound()
        found: list[StoredFile] = []
        for header in list(self._index.headers):
            if not any(key in used for key in header.entries):
                with suppress(FileNotFoundError):
                    stat = header.path.stat()
                    found.append(StoredFile(tuple(header.entries), stat.st_size, stat.st_mtime))
        return found

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
            present, journals = set(self._shards.glob("*.safetensors")), self._journals.states()
            for path in self._index.paths - present:
                self._forget(path)
            self._damaged = {path: text for path, text in self._damaged.items() if path in present}
            for path in sorted((present - self._index.paths) | self._damaged.keys()):
                self._open_shard(path)
            changed = {path for path, _ in journals.items() ^ self._journal_states.items()}
            changed |= self._index.freed.keys() - journals.keys()
            for header in [header for header in self._index.headers if header.path in changed]:
                self._index.add(header, self._journals.read(header.path))
            self._journal_states = journals

    def require_sound(self) -> None:
        """Raise StoreError that names every damaged shard, if there is one."""
        if self._damaged:
            raise StoreError("\n".join(text for _, text in sorted(self._damaged.items())))

    def verify(self) -> StoreCheck:
        """Read every tensor of every shard and compare its checksum; report all bad files."""
        self.refresh()
        problems = dict(self._damaged)
        for header in self._index.headers:
            if header.path not in problems:
                message = _first_problem(header)
                if message:
                    problems[header.path] = message
        found = tuple(text for _, text in sorted(problems.items()))
        return StoreCheck(len(self._index.paths | problems.keys()), self._index.num_keys, self._index.nbytes, found)

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
        self._damaged.pop(header.path, None)
        self._index.add(header, self._journals.read(header.path))

    def _remove_emptied(self, shards: Iterable[Path]) -> int:
        """Remove those of some shards whose keys are all freed, leased ones later; return the bytes."""
        removed = 0
        for path in list(shards):
            self._deferred.discard(path)
            header = self._index.find_emptied(path)
            if header is None:
                continue
            if self._leases.holds(path):
                self._deferred.add(path)
                continue
            size = self._journals.remove_shard(path, header.entries)
            if size is None:
                self._admit(header)  # another process has published it again
            else:
                removed += size
                self._forget(path)
        return removed

    def _forget(self, path: Path) -> None:
        self._index.remove(path)
        self._reader.forget(path)

    def _fetch(self, ref: SampleRef, name: str, key: str) -> Tensor:
        with self._lock:
            tensor = self._writer.tensors.get(key)
            holders = self._index.holders(key)
        if tensor is None:
            if not holders:
                raise StoreError(self._absent(ref, name, key))
            try:
                tensor = self._reader.get(holders[0], key, self._verify)
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
