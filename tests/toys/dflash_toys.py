"""Samples, anchors and gradients for the tests of DFlash and of the strategies that are built on it."""

from __future__ import annotations

import torch
from draft_toys import HIDDEN, VOCAB
from torch import Tensor

from draftworks.strategies.dflash.loss import TaughtBlocks
from draftworks.strategies.dflash.strategy import DFlashStrategy

OPTIONS = {"block_size": 4, "num_layers": 2, "layer_ids": [1, 3, 6], "num_anchors": 5}
MASKS = [[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]


def sample(mask: list[int], seed: int, dtype=torch.float64, taps=("hf1", "hf3", "hf6")) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = {tap: torch.randn(len(mask), HIDDEN, generator=generator).to(dtype) for tap in taps}
    ids = torch.randint(VOCAB, (len(mask),), generator=generator)
    return {"input_ids": ids, "loss_mask": torch.tensor(mask, dtype=torch.bool), **features}


SAMPLES = [sample(mask, seed) for seed, mask in enumerate(MASKS)]


def side_by_side(one: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([one["hf1"], one["hf3"], one["hf6"]], dim=-1)


def gradients(strategy: DFlashStrategy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, weights = zip(*strategy.model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, weights)))


def label_blocks(states: Tensor, last: Tensor, labels: Tensor, counts: Tensor, positions: Tensor) -> TaughtBlocks:
    """Blocks whose losses are asked for, of states (L, H) of the labels that count, which are at `positions` of `last`."""
    spread, where = states.new_zeros(*counts.shape, states.shape[-1]), torch.zeros(counts.shape, dtype=torch.int64)
    spread, where = spread.masked_scatter(counts[..., None], states), where.masked_scatter(counts, positions)
    nothing = torch.zeros(len(labels), dtype=torch.int64)
    return TaughtBlocks(spread, nothing, labels, counts, where, last, states[:0], nothing.bool())


def one_label(state: Tensor, last: Tensor) -> TaughtBlocks:
    """The one label 0 of a state (1, H) after a target's (1, H)."""
    zero = torch.tensor([[0]])
    return label_blocks(state.view(1, -1), last, zero, zero == 0, zero[0])
