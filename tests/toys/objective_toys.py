"""Every strategy with every weighting of its objective, on a made-up target with as large a vocabulary as is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from strategy_cases import find_cases, list_options

from draftworks.config.strategies import resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts import layers
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash import model as dflash_model
from draftworks.strategies.eagle3 import loss as losses

HIDDEN = 16
PROMPT, ANSWER = 3, 36
"""Tokens of a sample."""
BLOCKS = {"block_size": 4, "num_layers": 1, "layer_ids": [1, 3], "num_anchors": ANSWER}
SIZES: Mapping[str, Mapping[str, Any]] = {
    name: {field: 1 if field == "num_layers" else size for field, size in list_options(name, BLOCKS).items()}
    for name in find_cases()
}


@dataclass(frozen=True)
class Case:
    """A strategy under some options, of sizes that are small."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.strategy, *(str(value) for value in self.options.values())])


def list_choices(case: Case) -> Iterator[tuple[str, str]]:
    """The strategy with its loss, and with its other options: what a covering has to meet, where not all of them together."""
    options = dict(case.options)
    yield case.strategy, options.pop("loss")
    yield case.strategy, str(options)


def in_blocks(strategy: str) -> bool:
    """Whether its objective goes by blocks, as many at a time as an option says."""
    return "objective_chunk_blocks" in resolve_strategy(strategy).options.model_fields


@contextmanager
def logits_at_once(elements: int, blocks: int) -> Iterator[None]:
    """Chains are trained, and propose, with so many elements of logits at a time, block strategies propose so many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_ELEMENTS", elements)
        patch.setattr(losses, "MIN_CHUNK_LABELS", 1)
        patch.setitem(layers.LOGITS_PER_CHUNK, "cpu", elements)
        patch.setattr(dflash_model, "DECODE_BLOCKS_AT_ONCE", blocks)
        yield


def strategy_of(case: Case, vocab: int, dtype: torch.dtype = torch.float32, **more: Any) -> DraftStrategy:
    """A draft whose weights are all away from where they begin. Where it has a vocabulary of its own, that is the lower half
    of the target's, and has all of the target's first choices."""
    spec, mapping, own = resolve_strategy(case.strategy), None, {}
    if spec.uses_vocab_mapping:
        mapping = VocabMapping(np.zeros(vocab // 2, np.int64), np.arange(vocab) < vocab // 2)
        own = {"draft_vocab_size": vocab // 2}
    options = spec.options(**{**SIZES[case.strategy], **case.options, **own, **more})
    strategy = spec.load_factory()(options, target_of(vocab, dtype), mapping, 0)
    strategy.model.to(dtype)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in strategy.model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(dtype))
    return strategy


def target_of(vocab: int, dtype: torch.dtype) -> TargetParts:
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, vocab, HIDDEN, generator=generator).to(dtype)
    head[vocab // 2 :] *= 0.01
    return TargetParts(
        hidden_size=HIDDEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=20,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        num_layers=8,
        max_positions=128,
        embedding=embedding,
        head=head,
    )


def batch_of(strategy: DraftStrategy, samples: int, vocab: int, holes: float = 0.0) -> TrainBatch:
    """Samples of a prompt and an answer, every token in the lower half of the vocabulary.

    Args:
        holes: share of the answers that is not supervised, here and there, so that labels of a block count here and there.
    """
    generator, dtype = torch.Generator().manual_seed(2), next(strategy.model.parameters()).dtype
    length, laid = PROMPT + ANSWER, []
    for _ in range(samples):
        sample = {name: torch.randn(length, HIDDEN, generator=generator).to(dtype) for name in strategy.feature_names}
        sample["input_ids"] = torch.randint(vocab // 2, (length,), generator=generator)
        supervised = torch.rand(length, generator=generator) >= holes
        laid.append({**sample, "loss_mask": supervised & (torch.arange(length) >= PROMPT)})
    return strategy.collate(laid, [str(index) for index in range(samples)])
