"""Domino written down once more, plainly: one block at a time, one token at a time, logits kept, autograd."""

from __future__ import annotations

from dataclasses import dataclass

import dflash_reference as dflash
import torch
from torch import Tensor

from draftworks.strategies.domino.strategy import DominoStrategy


@dataclass(frozen=True)
class BlockLogits:
    """What comes after the anchor, (k, V) each, every token fed the given ones before it."""

    base: Tensor
    corrected: Tensor


def gru_step(weights: dict[str, Tensor], x: Tensor, state: Tensor) -> Tensor:
    """The gated recurrent unit without biases (Cho et al., arXiv 1406.1078), as torch documents it."""
    from_x = weights["correction.prefix_gru.weight_ih_l0"] @ x
    from_state = weights["correction.prefix_gru.weight_hh_l0"] @ state
    (reset_x, update_x, new_x), (reset_s, update_s, new_s) = from_x.chunk(3), from_state.chunk(3)
    reset, update = torch.sigmoid(reset_x + reset_s), torch.sigmoid(update_x + update_s)
    return (1 - update) * torch.tanh(new_x + reset * new_s) + update * state


def block_logits(strategy: DominoStrategy, ids: Tensor, features: Tensor, anchor: int, fed: list[int]) -> BlockLogits:
    """`fed`: the k tokens that the k proposals know last, the anchor's first."""
    weights, options = dict(strategy.model.named_parameters()), strategy.options
    target = strategy._dflash._target
    rows = dflash.block_rows(strategy._dflash, ids, features, anchor)[0 if options.shift_label else 1 :]
    state, base, corrected = rows.new_zeros(options.gru_hidden_dim), [], []
    for place, token in enumerate(fed):
        state = gru_step(weights, target.embedding[token], state)
        base.append(target.head @ rows[place])
        narrow = weights["correction.embed_proj.0.weight"] @ torch.cat([rows[place], state])
        correction = weights["correction.embed_proj.2.weight"] @ (narrow * torch.sigmoid(narrow))
        corrected.append(base[-1] + correction if place >= options.pure_draft_prefix_len else base[-1])
    return BlockLogits(torch.stack(base), torch.stack(corrected))


def greedy(strategy: DominoStrategy, ids: Tensor, features: Tensor, anchor: int, count: int) -> list[int]:
    """Each token the first choice after those before it, all logits computed again for every token."""
    fed = [int(ids[anchor])]
    for _ in range(count):
        fed.append(int(block_logits(strategy, ids, features, anchor, fed).corrected[-1].argmax()))
    return fed[1:]


@dataclass
class Sums:
    """Over all blocks of a sample."""

    loss: Tensor | float = 0.0
    accepted: float = 0.0
    base_accepted: float = 0.0
    blocks: int = 0


def sums(
    strategy: DominoStrategy, ids: Tensor, mask: Tensor, features: Tensor, anchors: list[int], lambda_base: float
) -> Sums:
    """Of one sample, over blocks at given anchors."""
    total, size = Sums(loss=torch.zeros((), dtype=features.dtype)), strategy.options.labels + 1
    for anchor in anchors:
        counted = dflash.label_counts(mask, anchor, size, contiguous=strategy.options.loss == "token_mean")
        labels = torch.cat([ids, ids.new_zeros(size)])[anchor + 1 : anchor + size]
        fed = [int(ids[anchor]), *labels[:-1].tolist()]
        logits = block_logits(strategy, ids, features, anchor, fed)
        base, final = (-z.log_softmax(-1)[range(len(labels)), labels] for z in (logits.base, logits.corrected))
        weights = dflash.weights_of(strategy._dflash, final.detach(), counted)
        total.loss = total.loss + (((1 - lambda_base) * final + lambda_base * base) * weights).sum()
        total.accepted += _prefix(logits.corrected, labels, counted)
        total.base_accepted += _prefix(logits.base, labels, counted)
        total.blocks += int(counted.any())
    return total


def _prefix(logits: Tensor, labels: Tensor, counted: Tensor) -> int:
    """Leading labels that are the first choice; one that does not count is passed over."""
    length = 0
    for choice, label, on in zip(logits.argmax(-1).tolist(), labels.tolist(), counted.tolist()):
        if on and choice != label:
            break
        length += on
    return length
