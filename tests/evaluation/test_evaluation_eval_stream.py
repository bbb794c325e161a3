"""An evaluation gives the same result from any kind of feature store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.target_parts import TargetParts
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.result import EvalResult
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.joined_store import JoinedStore
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.local_store import LocalFeatureStore
from draftworks.strategies.eagle3.options import Eagle3Options
from draftworks.strategies.eagle3.strategy import Eagle3Strategy

HIDDEN, VOCAB, STREAMS = 16, 40, ("hf2", "hf4", "hf5", "last")


@dataclass(frozen=True)
class Row:
    input_ids: np.ndarray
    loss_mask: np.ndarray


class Rows:
    """Tokens of samples of 5 to 39 tokens, each supervised from some position on."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(3)
        self._rows = {}
        for index in range(count):
            length = int(generator.integers(5, 40))
            supervised = np.arange(length) >= generator.integers(1, length - 2)
            self._rows[f"s{index}"] = Row(generator.integers(0, VOCAB, length), supervised)

    def by_id(self, sample_id: str) -> Row:
        return self._rows[sample_id]

    def refs(self) -> list[SampleRef]:
        return [
            SampleRef(
                name,
                "run",
                name,
                "",
                {stream: f"{name}.{stream}" for stream in STREAMS},
                {},
                num_tokens=len(row.input_ids),
            )
            for name, row in self._rows.items()
        ]


def eagle3() -> Eagle3Strategy:
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    parts = TargetParts(
        hidden_size=HIDDEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        num_layers=8,
        max_positions=64,
        embedding=table,
        head=table,
    )
    vocab = build_vocab_mapping(np.arange(VOCAB)[::-1].copy(), 24)
    return Eagle3Strategy(Eagle3Options(ttt_length=3, draft_vocab_size=24), parts, vocab, seed=7)


def features(ref: SampleRef, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(ref.sample_id[1:]))
    return {name: torch.randn(ref.num_tokens, HIDDEN, generator=generator).to(dtype) for name in STREAMS}


def filled(store: FeatureStore, rows: Rows, dtype: torch.dtype) -> list[SampleRef]:
    return [store.put(ref, features(ref, dtype)) for ref in rows.refs()]


def evaluated(strategy: Eagle3Strategy, refs: list[SampleRef], store: FeatureStore, rows: Rows) -> EvalResult:
    loader = FeatureDataLoader.for_evaluation(refs, JoinedStore(store, rows), 4, strategy.collate)
    result = Evaluator().run(strategy, loader)
    assert result is not None
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_and_shared_stores_give_identical_metrics_and_the_shared_one_again(tmp_path: Path, dtype: torch.dtype):
    strategy, rows = eagle3(), Rows(19)
    local = LocalFeatureStore(tmp_path / "local")
    from_local = evaluated(strategy, filled(local, rows, dtype), local, rows)
    shared = KeyedSharedDirStore(tmp_path / "shared")
    refs = filled(shared, rows, dtype)
    reopened = KeyedSharedDirStore(tmp_path / "shared")
    first, second = (evaluated(strategy, refs, store, rows) for store in (shared, reopened))
    assert from_local == first == second
    assert from_local.metrics() == first.metrics()
    assert from_local.supervised_tokens > 19
    assert sum(from_local.correct) > 0
    assert reopened.health() | {"samples": 4 * 19, "leases": 0} == reopened.health()


def test_other_features_give_another_result(tmp_path: Path):
    """What the first test would miss if nothing of a store reached the metrics."""
    strategy, rows = eagle3(), Rows(5)
    store = KeyedSharedDirStore(tmp_path)
    refs = filled(store, rows, torch.float32)
    before = evaluated(strategy, refs, store, rows)
    store.free(refs[3].feature_keys.values())
    refs[3] = store.put(refs[3], {name: tensor.neg() for name, tensor in features(refs[3], torch.float32).items()})
    assert evaluated(strategy, refs, store, rows) != before
