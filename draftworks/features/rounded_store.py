"""A store whose features are rounded when they are read, as if they had been stored in fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef
from draftworks.features.scaled_fp8 import round_stream
from draftworks.features.wrapped_store import WrappedStore

if TYPE_CHECKING:
    from torch import Tensor

    from draftworks.config.capture import FeatureStorage


class RoundedStore(WrappedStore):
    """Returns the streams that `storage` encodes as a capture into it would give them; `store` has them in bfloat16."""

    def __init__(self, store: FeatureStore, storage: FeatureStorage) -> None:
        super().__init__(store)
        self._storage = storage

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        tensors, handle = self._store.get(ref)
        return {name: round_stream(t) if self._encodes(name) else t for name, t in tensors.items()}, handle

    def _encodes(self, name: str) -> bool:
        return self._storage == "fp8" or (self._storage == "fp8_taps" and name != "last")
