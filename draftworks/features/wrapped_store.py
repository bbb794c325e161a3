"""Feature stores that stand before another: joined with tokens, or rounded as in fp8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef
from draftworks.features.tensor_bytes import round_stream

if TYPE_CHECKING:
    from draftworks.config.capture import FeatureStorage


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


class TokenRowLike(Protocol):
    """A tokenized sample: `input_ids` (S,) integers, `loss_mask` (S,) booleans."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def loss_mask(self) -> np.ndarray: ...


class TokensById(Protocol):
    """A tokenized set that finds a data row by its id; raises StoreError for an unknown id."""

    def by_id(self, sample_id: str) -> TokenRowLike: ...


class JoinedStore(WrappedStore):
    """Adds `input_ids` (S,) int64 and `loss_mask` (S,) bool to what `store` returns for a sample.

    Loss masks are not features: the same features serve under another mask, so masks stay with the tokens.
    """

    def __init__(self, store: FeatureStore, tokens: TokensById) -> None:
        super().__init__(store)
        self._tokens = tokens

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Fetch as `FeatureStore.get`; StoreError also if the sample has no tokens or a feature not one row per token."""
        try:
            row = self._tokens.by_id(ref.sample_id)
        except StoreError as error:
            raise StoreError(
                f"sample {ref.sample_id} has features but no tokens: {error}. Capture the features of this tokenized set."
            ) from error
        tensors, handle = self._store.get(ref)
        count = len(row.input_ids)
        for name, tensor in tensors.items():
            if tensor.shape[:1] != (count,):
                self._store.release(handle)
                raise StoreError(
                    f"sample {ref.sample_id}, feature {name}: expected {count} rows, one per token, "
                    f"found {tensor.shape[0] if tensor.shape else 'a scalar'}"
                )
        tokens = {
            "input_ids": torch.from_numpy(np.asarray(row.input_ids, dtype=np.int64)),
            "loss_mask": torch.from_numpy(np.asarray(row.loss_mask, dtype=np.bool_).copy()),
        }
        return {**tokens, **tensors}, handle


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
