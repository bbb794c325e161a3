"""A feature store in a folder that several machines share (NFS, Lustre): one file per feature, by its content key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef, StoredFile
from draftworks.features.sample_folder import (
    SampleFolder,
    age_s,
    file_size,
    read_sample_header,
    read_tensor,
    remove,
    sample_key,
    write_sample,
)
from draftworks.features.store_parts import LeaseTable, fill_in_ref, require_spec
from draftworks.storage.files import fsync, open_regular

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = "feature"
"""Name of the one tensor of a file."""
FEW_KEYS = 1000


class KeyedSharedDirStore(KeyedFeatureStore):
    """Features that any number of processes on any number of machines put, get and free. Thread-safe.

    Another strategy adds its taps to existing samples, samples with the same tokens share their features, and references
    equal those of any other store with the same content. What is put is published at once, by a link that never
    replaces, and kept until it is freed. Tensors are copies, so what is freed goes at once, leased or not.

    Args:
        root: created if absent. Its file system must have hard links.
        max_hold_age_s: leases older than this are dropped by `gc`.
        staging_age_s: a staging file not written to for this long counts as a crashed writer's: processes of other
            machines, or of containers that share this host's name, cannot be checked.
    """

    lease_bound = False

    def __init__(self, root: Path, max_hold_age_s: float = 3600.0, staging_age_s: float = 3600.0) -> None:
        self._folder = SampleFolder(root)
        self._staging_age_s = staging_age_s
        self._leases = LeaseTable(max_hold_age_s)
        self._lock = RLock()

    @property
    def uri(self) -> str:
        """The same on every machine, wherever each mounts the folder."""
        return f"disagg://{self._folder.store_id}"

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Publish tensors by feature name. A key that is stored already is not stored again.

        Raises:
            StoreError: the disk refuses.
        """
        for name, tensor in tensors.items():
            key = ref.feature_keys[name]
            if self._folder.find(key) is None:
                self._publish(key, tensor)
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        tensors = {name: self._read(ref, name, key) for name, key in ref.feature_keys.items()}
        with self._lock:
            return tensors, self._leases.grant(ref.sample_id)

    def release(self, handle: FeatureHandle) -> None:
        with self._lock:
            self._leases.end(handle)

    def abort(self, sample_id: str) -> None:
        """Void the sample's leases. `put` buffers nothing that could be discarded."""
        with self._lock:
            self._leases.void(sample_id)

    def gc(self) -> int:
        """Drop old leases; remove what crashed writers left; return the bytes freed."""
        with self._lock:
            self._leases.expire()
        return sum(map(remove, [each for each in self._folder.staging_files() if age_s(each) > self._staging_age_s]))

    def health(self) -> dict[str, Any]:
        files = self._folder.list_files()
        return {
            "root": str(self._folder.root),
            "uri": self.uri,
            "samples": len(files),
            "bytes": sum(map(file_size, files.values())),
            "staging_files": len(self._folder.staging_files()),
            "leases": len(self._leases),
        }

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys not stored. Few keys are looked up one by one: the folder may have millions of files."""
        keys = list(keys)
        if len(keys) <= FEW_KEYS:
            return [key for key in keys if self._folder.find(key) is None]
        present = self._folder.list_files()
        return [key for key in keys if sample_key(key) not in present]

    def free(self, keys: Iterable[str]) -> int:
        return sum(self._folder.remove(sample_key(key)) for key in keys)

    def find_unused(self, used: Collection[str]) -> list[StoredFile]:
        kept = set(map(sample_key, used))
        found: list[StoredFile] = []
        for digest, path in self._folder.list_files().items():
            if digest not in kept:
                found.append(StoredFile((path.name,), file_size(path), path.stat().st_mtime))
        return found

    def remove_files(self, files: Iterable[StoredFile]) -> int:
        return sum(self._folder.remove(name.partition(".")[0]) for file in files for name in file.keys)

    def refresh(self) -> None:
        """No-op: `find_missing` caches nothing."""

    def flush(self) -> None:
        """No-op: `put` buffers nothing."""

    def close(self) -> None:
        """No-op: `get` keeps nothing open."""

    def _publish(self, key: str, tensor: Tensor) -> None:
        path = self._folder.path(key)
        try:
            with self._folder.stage() as staged:
                write_sample(staged, key, {FEATURE: tensor})
                fsync(staged)
                self._folder.publish(staged, path)  # another process may have put the same content
        except (OSError, SafetensorError) as error:
            raise StoreError(f"feature {key} cannot be written to {path}: {error}") from error

    def _read(self, ref: SampleRef, name: str, key: str) -> Tensor:
        where = f"sample {ref.sample_id}, feature {name}"
        path = self._folder.find(key)
        try:
            if path is None:
                raise FileNotFoundError
            with open_regular(path) as stream:
                header = read_sample_header(stream, path)
                if header.sample_id != key or FEATURE not in header.tensors:
                    raise StoreError(f"{path} holds {header.sample_id!r}, expected {key!r}: it was renamed")
                record = header.tensors[FEATURE]
                require_spec(ref.feature_specs.get(name), record.shape, record.dtype, str(path))
                return read_tensor(stream, header, FEATURE)
        except FileNotFoundError as error:
            raise StoreError(
                f"{where}: key {key} is not in the feature store {self._folder.root}. Capture the features again: only "
                "what is missing will be captured"
            ) from error
        except (OSError, StoreError) as error:
            raise StoreError(f"{where}: {error}. If the file is damaged, remove it and capture again") from error
