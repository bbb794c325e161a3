"""A feature store joined with the tokens that the features were computed from."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef
from draftworks.features.wrapped_store import WrappedStore


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
