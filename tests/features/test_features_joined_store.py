"""Features and tokens are joined by sample id, and have to agree in length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from features_toys import ToyTokens, filled_store, toy_ref

from draftworks.errors import StoreError
from draftworks.features.wrapped_store import JoinedStore


def test_tokens_are_added_to_features(tmp_path: Path):
    store, refs = filled_store(tmp_path, 3)
    tensors, handle = JoinedStore(store, ToyTokens(refs)).get(refs[2])
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "input_ids": (5,),
        "loss_mask": (5,),
        "hf2": (5, 4),
        "last": (5, 4),
    }
    assert tensors["input_ids"].dtype == torch.int64
    assert tensors["loss_mask"].dtype == torch.bool
    assert handle.sample_id == "s2"


def test_rows_must_equal_tokens(tmp_path: Path):
    store, refs = filled_store(tmp_path, 3)
    with pytest.raises(StoreError, match="sample s1, feature hf2: expected 5 rows, one per token, found 4"):
        JoinedStore(store, ToyTokens(refs, extra=1)).get(refs[1])
    assert store.health()["leases"] == 0


def test_unknown_sample_is_named(tmp_path: Path):
    store, refs = filled_store(tmp_path, 3)
    with pytest.raises(StoreError, match="sample s1 has features but no tokens: sample s1 is not here"):
        JoinedStore(store, ToyTokens([toy_ref(0)])).get(refs[1])
