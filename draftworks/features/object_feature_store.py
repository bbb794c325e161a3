"""A feature store in object storage: immutable shards, found by the index, read by ranges, kept in a local cache.

    shards/{digest}-{id}.safetensors    tensors of many samples, written once; removed when all its keys are freed
    index/                              what is stored, see `object_index`

A shard counts when the index names it, which is after it is complete. Reading lists nothing.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef, StoredFile
from draftworks.features.feature_cache import FeatureCache, ReadAhead
from draftworks.features.object_shard import IndexChange, ObjectIndex, PlacedEntry, SampleBytes, encode_shard
from draftworks.features.shards import ShardBuffer, ShardHeader
from draftworks.features.store_parts import LeaseTable, dtype_name, fill_in_ref, require_spec
from draftworks.storage.object_access import MissingObjectError
from draftworks.storage.object_store import ByteRange, ObjectStore

if TYPE_CHECKING:
    from torch import Tensor

SHARDS = "shards"
ORPHAN_AGE_S = 24 * 3600.0
"""Age at which a shard that the index does not name counts as that of a crashed writer."""
AHEAD_BATCHES = 64
log = logging.getLogger(__name__)


class LostShardError(Exception):
    """There is no object of a shard that the index names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.name)
        self.path = path


class ObjectFeatureStore(KeyedFeatureStore):
    """Features in object storage, as `LocalFeatureStore` has them in a folder. Thread-safe.

    Args:
        objects: the storage below the store's URL.
        cache: of features that were read; None: none are kept.
        shard_bytes: `put` publishes a shard once it holds this much.
        max_hold_age_s: leases older than this are dropped by `gc`.
        orphan_age_s: `gc` removes shards that no index names once they are older.
        read_ahead_bytes: bound of what is read before it is asked for.
        requests: samples that are read ahead at a time.
        keep_tensors: `put` buffers the tensors themselves, which nobody changes afterwards, and not copies of them.

    Raises:
        ObjectStorageError: the storage cannot be reached, or refuses. All calls may raise it.
    """

    lease_bound = False
    lookahead = AHEAD_BATCHES

    def __init__(
        self,
        objects: ObjectStore,
        cache: FeatureCache | None = None,
        shard_bytes: int = 256 << 20,
        max_hold_age_s: float = 3600.0,
        orphan_age_s: float = ORPHAN_AGE_S,
        read_ahead_bytes: int = 256 << 20,
        requests: int = 16,
        keep_tensors: bool = False,
    ) -> None:
        self._objects = objects
        self._shards = objects.inside(SHARDS)
        self._cache = cache
        self._buffer = ShardBuffer(shard_bytes, keep_tensors)
        self._wanted_by: dict[str, set[str]] = {}
        self._index = ObjectIndex(objects)
        self._orphan_age_s = orphan_age_s
        self._leases = LeaseTable(max_hold_age_s)
        self._deferred: set[Path] = set()
        self._lock = RLock()
        self._ahead = ReadAhead(self._read_missing, self._measure_missing, read_ahead_bytes, requests)
        self._index.refresh()

    @property
    def uri(self) -> str:
        return self._objects.url

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Store tensors by feature name. A key that is stored already is not stored again.

        Tensors are buffered; they are stored after the shard is full or after `flush`.
        """
        with self._lock:
            for name, tensor in tensors.items():
                key = ref.feature_keys[name]
                if not self._index.shards.holders(key):
                    self._buffer.add(key, tensor)
                    self._wanted_by.setdefault(key, set()).add(ref.sample_id)
            if self._buffer.full:
                self.flush()
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Return tensors by feature name: copies of what is stored, read ahead where they were expected."""
        with self._lock:
            holders = map(self._index.shards.holders, ref.feature_keys.values())
            handle = self._leases.grant(ref.sample_id, {found[0].path for found in holders if found})
        try:
            found = dict(self._ahead.take(ref))
            found.update(self._fetch(ref, [key for key in ref.feature_keys.values() if key not in found]))
            tensors = {}
            for name, key in ref.feature_keys.items():
                tensor, where = found[key], f"sample {ref.sample_id}, feature {name}"
                require_spec(ref.feature_specs.get(name), tuple(tensor.shape), dtype_name(tensor), where)
                tensors[name] = tensor
            return tensors, handle
        except BaseException:
            self.release(handle)
            raise

    def expect(self, refs: Sequence[SampleRef]) -> None:
        """Begin to read samples that will be asked for soon, within the bound of what may be read ahead."""
        self._ahead.expect(refs)

    def forget_expected(self) -> None:
        self._ahead.forget()

    def release(self, handle: FeatureHandle) -> None:
        """Return the lease; shards whose keys were all freed meanwhile go with the last one."""
        with self._lock:
            self._leases.end(handle)
            self._remove_emptied(list(self._deferred))

    def abort(self, sample_id: str) -> None:
        """Discard what was put for a sample and is not published, and void its leases."""
        with self._lock:
            self._leases.void(sample_id)
            self._remove_emptied(list(self._deferred))
            for key, samples in list(self._wanted_by.items()):
                samples.discard(sample_id)
                if not samples:
                    self._buffer.discard(key)
                    del self._wanted_by[key]

    def gc(self) -> int:
        """Remove old leases, shards of crashed writers, and shards whose keys are all freed; return the bytes freed.

        The one call that lists objects.
        """
        with self._lock:
            self._leases.expire()
            self._index.refresh()
            freed = self._remove_emptied(list(self._index.shards.freed))
            oldest = time.time() - self._orphan_age_s
            orphans = [
                found
                for found in self._shards.list()
                if self._index.shards.find(Path(found.path)) is None and found.modified <= oldest
            ]
            self._shards.remove([found.path for found in orphans])
        return freed + sum(found.nbytes for found in orphans)

    def health(self) -> dict[str, Any]:
        with self._lock:
            return {
                "url": self.uri,
                "shards": len(self._index.shards.headers),
                "tensors": self._index.shards.num_keys,
                "bytes": self._index.shards.nbytes,
                "freed_bytes": self._index.shards.freed_bytes,
                "unpublished_bytes": self._buffer.nbytes,
                "changes": self._index.changes,
                "leases": len(self._leases),
                **({} if self._cache is None else self._cache.count()),
            }

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        with self._lock:
            return [key for key in keys if not self._index.shards.holders(key) and key not in self._buffer.tensors]

    def free(self, keys: Iterable[str]) -> int:
        """Remove features by key; see `KeyedFeatureStore.free`. A shard's object goes when all its keys are freed."""
        keys = list(keys)
        touched: set[Path] = set()

        def make() -> IndexChange | None:
            freed: defaultdict[Path, set[str]] = defaultdict(set)
            for key in keys:
                for header in self._index.shards.holders(key):
                    freed[header.path].add(key)
            touched.update(freed)
            return IndexChange(freed={path: frozenset(each) for path, each in freed.items()}) if freed else None

        with self._lock:
            for key in keys:
                self._buffer.discard(key)
                self._wanted_by.pop(key, None)
            self._index.append(make)
            return self._remove_emptied(list(touched))

    def find_unused(self, used: Collection[str]) -> list[StoredFile]:
        with self._lock:
            self._index.refresh()
            headers = list(self._index.shards.headers)
        written = {each.path: each.modified for each in self._shards.list()}
        return [
            StoredFile(tuple(header.entries), header.expected_bytes, written.get(header.path.name, time.time()))
            for header in headers
            if not any(key in used for key in header.entries)
        ]

    def flush(self) -> None:
        """Publish what is buffered: the shard first, then the change of the index that names it."""
        with self._lock:
            if not self._buffer.tensors:
                return
            begun = time.time()
            shard = encode_shard(self._buffer.tensors)
            self._write(shard.header, shard.content)
            if time.time() - begun > self._orphan_age_s / 2 > 0:  # it may count as an orphan by now
                shard = encode_shard(self._buffer.tensors)
                self._write(shard.header, shard.content)
            self._index.append(lambda: IndexChange(added=(shard.header,)))
            self._buffer.clear()
            self._wanted_by.clear()

    def refresh(self) -> None:
        """Read what other processes have published or removed since."""
        with self._lock:
            self._index.refresh()

    def close(self) -> None:
        """Publish what is buffered, and end the threads that read ahead."""
        self.flush()
        self._ahead.close()

    def require_writable(self) -> None:
        """Raise unless the storage lets this process write; see `ObjectStore.require_writable`."""
        self._objects.require_writable()

    def _write(self, header: ShardHeader, content: bytearray) -> None:
        # A name that exists is this writer's own, whose first answer was lost.
        self._shards.create(header.path.name, content)

    def _remove_emptied(self, shards: Iterable[Path]) -> int:
        """Remove those of some shards whose keys are all freed, leased ones later; return the bytes."""
        emptied: list[ShardHeader] = []
        for path in shards:
            self._deferred.discard(path)
            header = self._index.shards.find_emptied(path)
            if header is None:
                continue
            if self._leases.holds(path):
                self._deferred.add(path)
            else:
                emptied.append(header)
        if not emptied:
            return 0
        self._shards.remove([header.path.name for header in emptied])

        def make() -> IndexChange | None:
            left = tuple(header.path for header in emptied if self._index.shards.find(header.path) is not None)
            return IndexChange(removed=left) if left else None

        self._index.append(make)
        return sum(header.expected_bytes for header in emptied)

    def _measure_missing(self, ref: SampleRef) -> int:
        """Return the bytes of a sample that would have to be requested."""
        placed: defaultdict[Path, dict[str, PlacedEntry]] = defaultdict(dict)
        with self._lock:
            for key in ref.feature_keys.values():
                for header in self._index.shards.holders(key)[:1]:
                    placed[header.path][key] = _require_placed(header, key)
        wanted = map(SampleBytes, placed.values())
        return sum(each.nbytes for each in wanted if self._cache is None or not self._cache.has(each))

    def _read_missing(self, ref: SampleRef) -> Mapping[str, Tensor]:
        """Return those features of a sample that are stored and not in the cache; none if a shard is gone."""
        with self._lock:
            stored = [key for key in ref.feature_keys.values() if self._index.shards.holders(key)]
        try:
            return self._read_by_shard(ref, stored)
        except LostShardError:
            return {}  # `get` looks again, and says what is missing

    def _fetch(self, ref: SampleRef, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return features by key, from the buffer, the cache or their shards."""
        while True:
            try:
                return self._read_by_shard(ref, keys)
            except LostShardError as lost:
                self._give_up(lost.path)

    def _give_up(self, path: Path) -> None:
        """Take a shard out of the index that is not there any more, so that its samples are captured again."""
        with self._lock:
            self._index.refresh()
            if self._index.shards.find(path) is None:
                return  # whoever removed it has said so
            log.warning(
                "%s is gone, and nobody has freed its samples: they are missing now", self._shards.locate(path.name)
            )
            self._index.append(lambda: IndexChange(removed=(path,)) if self._index.shards.find(path) else None)

    def _read_by_shard(self, ref: SampleRef, keys: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        wanted: defaultdict[Path, dict[str, PlacedEntry]] = defaultdict(dict)
        with self._lock:
            for key in keys:
                tensor, holders = self._buffer.tensors.get(key), self._index.shards.holders(key)
                if tensor is not None:
                    found[key] = tensor.clone()
                elif not holders:
                    raise StoreError(self._describe_absent(ref, key))
                else:
                    wanted[holders[0].path][key] = _require_placed(holders[0], key)
        for path, entries in wanted.items():
            found.update(self._read_shard(ref, path, SampleBytes(entries)))
        return found

    def _read_shard(self, ref: SampleRef, path: Path, wanted: SampleBytes) -> dict[str, Tensor]:
        """Return features of one shard, from the cache or the shard; what comes from there is kept in the cache."""
        content = None if self._cache is None else self._cache.read(wanted)
        if content is not None:
            return wanted.restore(content)
        ranges = [ByteRange(e.start, e.start + e.nbytes) for e in wanted.entries.values() if e.nbytes]
        try:
            parts = self._shards.read_ranges(path.name, ranges) if ranges else []
        except MissingObjectError as error:
            raise LostShardError(path) from error
        except StoreError as error:
            raise type(error)(f"sample {ref.sample_id}: {error}") from error
        content = wanted.join(parts)
        altered = wanted.find_altered(content)
        if altered is not None:
            raise StoreError(
                f"sample {ref.sample_id}: {self._shards.locate(path.name)} is altered: key {altered} has not the checksum "
                f"{wanted.entries[altered].quick}. Delete this object and run again: its samples are then captured again"
            )
        if self._cache is not None:
            self._cache.keep(wanted, content)
        return wanted.restore(content)

    def _describe_absent(self, ref: SampleRef, key: str) -> str:
        names = {each: name for name, each in ref.feature_keys.items()}
        return (
            f"sample {ref.sample_id}, feature {names.get(key, '')}: key {key} is not in the feature store {self.uri}. "
            "Capture the features again: only what is missing will be captured"
        )


def _require_placed(header: ShardHeader, key: str) -> PlacedEntry:
    entry = header.entries[key]
    assert isinstance(entry, PlacedEntry), "every shard of an index says where its tensors lie"
    return entry
