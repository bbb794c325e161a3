"""A shared folder in which features lie under their content keys, as in a local store."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureSpec, KeyedFeatureStore, SampleRef
from draftworks.features.shared_dir_store import SharedDirFeatureStore

FEATURE = "feature"
FEW_KEYS = 1000


class KeyedSharedDirStore(KeyedFeatureStore):
    """Every feature is a sample of its own in a `SharedDirFeatureStore`, and its key that sample's id.

    So another strategy adds its taps to samples that are there, samples with the same tokens share their features, and
    references are those of any other store with the same content. What is put is published at once and kept; tensors
    are copies, so leases bind nothing.

    Args:
        root: created if absent. Its file system must have hard links.
    """

    lease_bound = False

    def __init__(self, root: Path) -> None:
        self._store = SharedDirFeatureStore(root, retain_on_release=True)

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Publish tensors by feature name. A key that is stored already is not stored again."""
        specs = {}
        for name, tensor in tensors.items():
            key = ref.feature_keys[name]
            specs[name] = FeatureSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if self._store.find_newest_file(key) is None:
                self._store.put(self._sample(key, FEATURE), {FEATURE: tensor})
        specs = {**ref.feature_specs, **specs}
        size = sum(spec.nbytes for spec in specs.values())
        return replace(ref, feature_store_uri=self.uri, feature_specs=specs, estimated_bytes=size)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        tensors = {name: self._fetch(ref, name, key) for name, key in ref.feature_keys.items()}
        return tensors, FeatureHandle(ref.sample_id, 0, uuid.uuid4().hex)

    def release(self, handle: FeatureHandle) -> None:
        """Nothing is held: see `get`."""

    def abort(self, sample_id: str) -> None:
        """Nothing is buffered: see `put`."""

    def gc(self) -> int:
        return self._store.gc()

    def health(self) -> dict[str, Any]:
        return self._store.health()

    def estimate_bytes(self, ref: SampleRef) -> int:
        return self._store.estimate_bytes(ref)

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """A few keys are looked up one by one: the whole folder may have millions of files."""
        keys = list(keys)
        if len(keys) <= FEW_KEYS:
            return [key for key in keys if self._store.find_newest_file(key) is None]
        return self._store.find_absent(keys)

    def refresh(self) -> None:
        """Nothing is remembered: see `find_missing`."""

    def flush(self) -> None:
        """Nothing is buffered: see `put`."""

    def close(self) -> None:
        """Nothing is kept open: see `get`."""

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
                    continue  # another machine has put the same feature meanwhile, and ours went with it
                raise StoreError(f"{where}: {error}. If the file is damaged, remove it and capture again") from error
            self._store.release(handle)
            return found[FEATURE]
