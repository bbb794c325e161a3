"""The loss of MTP fine-tuning: cross-entropy of the tokens at every step under the target's frozen head, in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, as_logits, chunked_loss, score_labels

CHUNK_ELEMENTS = 2**22
"""Logits held at a time; at least MIN_CHUNK_LABELS labels."""
MIN_CHUNK_LABELS = 64


@dataclass(frozen=True)
class LabelChunk:
    """Some of the labels, (n,) int64, with their steps, (n,) int64; a `LossChunk`."""

    index: slice
    labels: Tensor
    steps: Tensor


def make_step_weights(decay: float, steps: int) -> list[float]:
    """Return decay^i / Σ_j decay^j for i = 0 … steps − 1 (FastMTP, arXiv 2509.18362, equation 2)."""
    weights = [decay**step for step in range(steps)]
    return [weight / sum(weights) for weight in weights]


def next_token_losses(
    states: Tensor, head: Tensor, labels: Sequence[Tensor], step_weights: Sequence[float]
) -> LossSums:
    """Return the weighted cross-entropy of all labels; by step, (T,) each, those unweighted and the labels that are the argmax.

    Args:
        states: (L, H), normed, of the labels of step 0, then of step 1, …
        head: (V, H), frozen.
        labels: T tensors of token ids, L together.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    weights = torch.tensor(step_weights, dtype=wide, device=states.device)  # (T,)
    steps = torch.arange(len(labels), device=states.device)
    numbers = steps.repeat_interleave(torch.tensor([len(each) for each in labels], device=states.device))  # (L,)

    def formula(chunk: LabelChunk, states: Tensor) -> LossSums:
        ce, hits = score_labels(as_logits(F.linear(states, head)), chunk.labels)  # (n,) each, of logits (n, V)

        def by_step(values: Tensor) -> Tensor:
            sums = torch.zeros(len(weights), dtype=torch.float64, device=values.device)
            return sums.index_add_(0, chunk.steps, values.detach().double())

        return LossSums(torch.dot(weights[chunk.steps], ce), {"loss_sums": by_step(ce), "acc_corrects": by_step(hits)})

    return chunked_loss(formula, _split(torch.cat(list(labels)), numbers, len(head)), [states])


def _split(labels: Tensor, steps: Tensor, vocab_size: int) -> Iterator[LabelChunk]:
    """Yield chunks of labels; at least one, which may be empty."""
    at_once = max(MIN_CHUNK_LABELS, CHUNK_ELEMENTS // vocab_size)
    for start in range(0, max(len(labels), 1), at_once):
        part = slice(start, start + at_once)
        yield LabelChunk(part, labels[part], steps[part])
