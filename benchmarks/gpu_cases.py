"""Synthetic targets, drafts of every strategy, and samples of random features, at real and at small sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftworks.config.strategies import StrategyOptions, list_strategies, resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, and options of the drafts made for it.

    Attributes:
        options: each goes to the strategies that have it.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    options: Mapping[str, Any] = field(default_factory=dict)


SHAPES = {
    "qwen3-8b": Shape(4096, 32, 8, 128, 12288, 151_936, 36, {"draft_vocab_size": 32_000}),
    "tiny": Shape(
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        vocab=512,
        layers=8,
        options={
            "draft_vocab_size": 128,
            "ttt_length": 3,
            "num_depths": 3,
            "num_layers": 2,
            "num_taps": 3,
            "block_size": 4,
            "num_anchors": 16,
            "emb_dim": 8,
            "gru_hidden_dim": 12,
            "markov_rank": 8,
            "refiner_rank": 8,
            "selector_rank": 8,
            "selector_top_k": 4,
            "lattice_size": 32,
            "lattice_heads": 4,
            "candidate_topk": 4,
        },
    ),
}
"""The options of drafts that are not named are the strategies' defaults, which are those of published drafts."""


NEED_A_REAL_TARGET = ("mtp",)
"""Strategies whose draft is a part of the target's own files."""


def engine_strategies() -> tuple[str, ...]:
    """Return the built-in strategies that a synthetic target is enough for; a plug-in's may need more."""
    built_in = (name for name in list_strategies() if resolve_strategy(name).factory.startswith("draftworks."))
    return tuple(name for name in built_in if name not in NEED_A_REAL_TARGET)


def select_options(name: str, shape: Shape, **changes: Any) -> StrategyOptions:
    """Return those of the shape's options and changes that the strategy has."""
    spec = resolve_strategy(name)
    wanted = {**shape.options, **changes}
    known = {option: value for option, value in wanted.items() if option in spec.options.model_fields}
    return spec.parse_options(known, where=f"options of {name}")


def made_up_target(
    shape: Shape, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> TargetParts:
    """Return a synthetic target; embedding and head are drawn on the device, so they are equal on one kind of device
    only.

    The head is scaled down outside the ids that `made_up_vocabulary` keeps, so every teacher argmax is inside and no
    position is left out.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.vocab, shape.hidden)
    embedding, head = (torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(2))
    head[shape.options["draft_vocab_size"] :] *= 0.01
    return TargetParts(
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        rms_norm_eps=1e-6,
        vocab_size=shape.vocab,
        num_layers=shape.layers,
        max_positions=32_768,
        embedding=embedding,
        head=head * shape.hidden**-0.5,
    )


def made_up_vocabulary(shape: Shape) -> VocabMapping:
    """Return a vocabulary mapping of the first ids."""
    size = shape.options["draft_vocab_size"]
    return VocabMapping(np.zeros(size, np.int64), np.arange(shape.vocab) < size)


def made_up_draft(name: str, shape: Shape, target: TargetParts, seed: int = 3, **changes: Any) -> DraftStrategy:
    """Return an untrained draft; weights that are initialised with zeros are drawn too, so that all have gradients."""
    spec = resolve_strategy(name)
    vocabulary = made_up_vocabulary(shape) if spec.uses_vocab_mapping else None
    strategy = spec.load_factory()(select_options(name, shape, **changes), target, vocabulary, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in strategy.model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return strategy


def made_up_samples(
    strategy: DraftStrategy,
    shape: Shape,
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
    supervised: float = 7 / 8,
    seed: int = 5,
) -> list[dict[str, Tensor]]:
    """Return a sample for each length: random tokens and features, the last `supervised` share supervised."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        features = {
            name: torch.randn(length, shape.hidden, generator=generator).to(dtype) for name in strategy.feature_names
        }
        ids = torch.randint(shape.vocab - 1, (length,), generator=generator)
        mask = torch.arange(length) >= round(length * (1 - supervised))
        samples.append({"input_ids": ids, "loss_mask": mask, **features})
    return samples


def names_of(samples: Sequence[Mapping[str, Tensor]]) -> list[str]:
    return [f"sample{index}" for index in range(len(samples))]
