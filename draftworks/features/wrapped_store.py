"""Feature stores that stand before another: joined with tokens, rounded as in fp8, opened to be read only (`file://`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef
from draftworks.features.local_store import LocalFeatureStore
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


class ReadOnlyFeatureStore(WrappedStore):
    """Features that a `LocalFeatureStore` has stored, for readers of stored feature sets. No call changes a file.

    Args:
        uri: `file:///folder`, as references and manifests name a local store.
        verify_reads: compare each tensor's checksum on its first read.
        max_hold_age_s: leases older than this are dropped by `gc`.

    Raises:
        StoreError: `uri` is of another scheme, or there is no local store.
    """

    def __init__(self, uri: str, verify_reads: bool = True, max_hold_age_s: float = 3600.0) -> None:
        self.uri = uri
        root = _parse_root(uri)
        if not (root / "shards").is_dir():
            raise StoreError(f"{uri}: expected a local feature store, found no folder {root / 'shards'}")
        self._local = LocalFeatureStore(root, verify_reads, max_hold_age_s=max_hold_age_s, read_only=True)
        super().__init__(self._local)

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Raise StoreError."""
        raise StoreError(f"sample {ref.sample_id} cannot be put into {self.uri}: it was opened to be read only")

    def abort(self, sample_id: str) -> None:
        """Raise StoreError."""
        raise StoreError(f"sample {sample_id} cannot be aborted in {self.uri}: it was opened to be read only")

    def gc(self) -> int:
        """Drop old leases; return 0."""
        self._local.expire_leases()
        return 0

    def refresh(self) -> None:
        """Read what other processes have published or removed since."""
        self._local.refresh()


def _parse_root(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise StoreError(f"{uri!r}: expected the address of a local feature store, file:///folder")
    return Path(unquote(parts.path))
