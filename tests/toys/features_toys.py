"""Small samples for the tests of features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef, TrainBatch
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.wrapped_store import WrappedStore

HIDDEN = 4


def toy_ref(index: int, streams: tuple[str, ...] = ("hf2", "last")) -> SampleRef:
    keys = {name: f"{index:030x}{number:02x}" for number, name in enumerate(streams)}
    return SampleRef(f"s{index}", "run", f"s{index}", "", keys, {}, num_tokens=3 + index % 5)


def toy_tensors(ref: SampleRef, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(ref.sample_id[1:]))
    return {name: torch.randn(ref.num_tokens, HIDDEN, generator=generator).to(dtype) for name in ref.feature_keys}


def filled_store(root: Path, count: int, shard_bytes: int = 1 << 20) -> tuple[LocalFeatureStore, list[SampleRef]]:
    store = LocalFeatureStore(root, shard_bytes=shard_bytes)
    refs = [store.put(ref, toy_tensors(ref)) for ref in map(toy_ref, range(count))]
    store.flush()
    return store, refs


@dataclass(frozen=True)
class ToyRow:
    input_ids: np.ndarray
    loss_mask: np.ndarray


class ToyTokens:
    """Tokens for `toy_ref` samples; `extra` makes them disagree with the features."""

    def __init__(self, refs: list[SampleRef], extra: int = 0) -> None:
        self._lengths = {ref.sample_id: ref.num_tokens + extra for ref in refs}

    def by_id(self, sample_id: str) -> ToyRow:
        if sample_id not in self._lengths:
            raise StoreError(f"sample {sample_id} is not here")
        length = self._lengths[sample_id]
        return ToyRow(np.arange(length, dtype=np.int32), np.ones(length, dtype=np.bool_))


class CountingStore(WrappedStore):
    """Wraps a store and remembers which samples were fetched, and how many leases are out."""

    def __init__(self, store: FeatureStore) -> None:
        super().__init__(store)
        self.lease_bound = True  # the loader has to copy
        self.fetched: list[str] = []
        self.leased = 0
        self.fail_on: str | None = None

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        if ref.sample_id == self.fail_on:
            raise OSError("the disk is gone")
        self.fetched.append(ref.sample_id)
        self.leased += 1
        return self._store.get(ref)

    def release(self, handle: FeatureHandle) -> None:
        self.leased -= 1
        self._store.release(handle)


def pad_collate(samples, sample_ids) -> TrainBatch:
    """Pads every tensor to the longest sample."""
    tensors = {
        name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True)
        for name in samples[0]
    }
    return TrainBatch(tensors, tuple(sample_ids))
