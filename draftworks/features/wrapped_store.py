"""Base of feature stores that change a few calls of another store and hand the rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef

if TYPE_CHECKING:
    from torch import Tensor


class WrappedStore(FeatureStore):
    """Hands every call on to `store`."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self.lease_bound = store.lease_bound
        self.lookahead = store.lookahead

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        return self._store.put(ref, tensors)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        return self._store.get(ref)

    def expect(self, refs: Sequence[SampleRef]) -> None:
        self._store.expect(refs)

    def forget_expected(self) -> None:
        self._store.forget_expected()

    def stop_waiting(self) -> None:
        self._store.stop_waiting()

    def release(self, handle: FeatureHandle) -> None:
        self._store.release(handle)

    def abort(self, sample_id: str) -> None:
        self._store.abort(sample_id)

    def gc(self) -> int:
        return self._store.gc()

    def health(self) -> dict[str, Any]:
        return self._store.health()

    def estimate_bytes(self, ref: SampleRef) -> int:
        return self._store.estimate_bytes(ref)
