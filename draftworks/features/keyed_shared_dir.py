"""A shared folder that stores features under their content keys, as the local store does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureSpec, KeyedFeatureStore, SampleRef, StoredFile
from draftworks.features.leases import LeaseTable
from draftworks.features.sample_folder import remove, sample_key
from draftworks.features.shared_dir_store import SharedDirFeatureStore
from draftworks.features.specs import fill_in_ref

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = "feature"
FEW_KEYS = 1000


class KeyedSharedDirStore(KeyedFeatureStore):
    """A `SharedDirFeatureStore` with one sample per feature, whose id is the feature key.

    So another strategy adds its taps to existing samples, samples with the same tokens share their features, and
    references equal those of any other store with the same content. What is put is published at once and kept until it
    is freed. Tensors are copies, so leases only defer the removal of freed files.

    Args:
        root: created if absent. Its file system must have hard links.
        max_hold_age_s: leases older than this are dropped by `gc`.
        staging_age_s: a staging file not written to for this long counts as a crashed writer's.
    """

    lease_bound = False

    def __init__(self, root: Path, max_hold_age_s: float = 3600.0, staging_age_s: float = 3600.0) -> None:
        self._store = SharedDirFeatureStore(root, retain_on_release=True, staging_age_s=staging_age_s)
        self._leases = LeaseTable(max_hold_age_s)
        self._deferred: defaultdict[str, list[Path]] = defaultdict(list)
        self._lock = RLock()

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Publish tensors by feature name. A key that is stored already is not stored again."""
        for name, tensor in tensors.items():
            key = ref.feature_keys[name]
            if self._store.find_newest_file(key) is None:
                self._store.put(self._sample(key, FEATURE), {FEATURE: tensor})
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        with self._lock:
            handle = self._leases.grant(ref.sample_id, 0, ref.feature_keys.values())
        try:
            return {name: self._fetch(ref, name, key) for name, key in ref.feature_keys.items()}, handle
        except BaseException:
            self.release(handle)
            raise

    def release(self, handle: FeatureHandle) -> None:
        """Return the lease; files that were freed meanwhile go with the last one."""
        with self._lock:
            self._leases.end(handle)
            self._remove_deferred()

    def abort(self, sample_id: str) -> None:
        """Void the sample's leases. `put` buffers nothing that could be discarded."""
        with self._lock:
            self._leases.void(sample_id)
            self._remove_deferred()

    def gc(self) -> int:
        with self._lock:
            self._leases.expire()
            freed = self._remove_deferred()
        return freed + self._store.gc()

    def health(self) -> dict[str, Any]:
        return {**self._store.health(), "leases": len(self._leases)}

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys not stored. Few keys are looked up one by one: the folder may have millions of files."""
        keys = list(keys)
        if len(keys) <= FEW_KEYS:
            return [key for key in keys if self._store.find_newest_file(key) is None]
        return self._store.find_absent(keys)

    def free(self, keys: Iterable[str]) -> int:
        """Remove the files of features, see `KeyedFeatureStore.free`; what is under lease here is set aside until then."""
        with self._lock:
            return sum(map(self._free, keys))

    def find_unused(self, used: Collection[str]) -> list[StoredFile]:
        kept = set(map(sample_key, used))
        return self._store.list_files(besides=kept)

    def remove_files(self, files: Iterable[StoredFile]) -> int:
        return sum(self._store.remove_file(name) for file in files for name in file.keys)

    def refresh(self) -> None:
        """No-op: `find_missing` caches nothing."""

    def flush(self) -> None:
        """No-op: `put` buffers nothing."""

    def close(self) -> None:
        """No-op: `get` keeps nothing open."""

    def _free(self, key: str) -> int:
        file = self._store.find_newest_file(key)
        if file is None:
            return 0
        if self._leases.holds(key):
            self._deferred[key].append(self._store.set_aside(file))
            return 0
        return self._store.remove_file(file)

    def _remove_deferred(self) -> int:
        """Remove the freed files whose last lease has ended; return the bytes."""
        done = [key for key in self._deferred if not self._leases.holds(key)]
        return sum(remove(path) for key in done for path in self._deferred.pop(key))

    def _sample(self, key: str, stored_as: str, spec: FeatureSpec | None = None) -> SampleRef:
        specs = {} if spec is None else {FEATURE: spec}
        return SampleRef(key, "", key, self.uri, {FEATURE: stored_as}, specs)

    def _fetch(self, ref: SampleRef, name: str, key: str) -> Tensor:
        where = f"sample {ref.sample_id}, feature {name}"
        while True:
            file = self._store.find_newest_file(key)
            if file is None:
                raise StoreError(
                    f"{where}: key {key} is not in the feature store {self._store.root}. Capture the features again: "
                    "only what is missing will be captured"
                )
            try:
                found, handle = self._store.get(self._sample(key, f"{file}/{FEATURE}", ref.feature_specs.get(name)))
            except StoreError as error:
                if self._store.find_newest_file(key) != file:
                    continue  # another machine put the same feature meanwhile, which removed this generation
                raise StoreError(f"{where}: {error}. If the file is damaged, remove it and capture again") from error
            self._store.release(handle)
            return found[FEATURE]
