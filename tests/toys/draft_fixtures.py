"""A small made-up target with its vocabulary mapping and random samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_toys import DRAFT_VOCAB, HIDDEN, VOCAB, small_target

from draftworks.data.vocab import VocabMapping
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.eagle3.options import Eagle3Options
from draftworks.strategies.eagle3.strategy import Eagle3Strategy


@pytest.fixture
def parts() -> TargetParts:
    return small_target()


@pytest.fixture(scope="module")
def vocab() -> VocabMapping:
    ids = np.sort(np.random.default_rng(2).permutation(VOCAB)[:DRAFT_VOCAB])
    return VocabMapping(ids - np.arange(DRAFT_VOCAB), np.isin(np.arange(VOCAB), ids))


@pytest.fixture
def make_strategy(parts: TargetParts, vocab: VocabMapping) -> Callable[..., Eagle3Strategy]:
    def make(dtype=torch.float32, seed: int = 3, shift_norms: bool = True, **options) -> Eagle3Strategy:
        chosen = Eagle3Options(**{"ttt_length": 4, "draft_vocab_size": DRAFT_VOCAB} | options)
        moved = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
        strategy = Eagle3Strategy(chosen, moved, vocab, seed)
        strategy.model.to(dtype)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # norms away from 1, so that a forgotten one shows
            for name, weight in strategy.model.named_parameters():
                if shift_norms and "norm" in name:
                    weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(dtype))
        return strategy

    return make


@pytest.fixture(scope="module")
def make_sample() -> Callable[..., dict[str, torch.Tensor]]:
    def make(mask: list[int], seed: int = 5, dtype=torch.float32) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        features = {n: torch.randn(len(mask), HIDDEN, generator=generator) for n in ("hf2", "hf4", "hf5", "last")}
        return {
            "input_ids": torch.randint(VOCAB, (len(mask),), generator=generator),
            "loss_mask": torch.tensor(mask, dtype=torch.bool),
            **{name: feature.to(dtype) for name, feature in features.items()},
        }

    return make
