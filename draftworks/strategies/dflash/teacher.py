"""The target's own distributions at the labels of blocks, made again from its last hidden states; acceptance under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.config.decoding import Decoding
from draftworks.drafts.acceptance import find_served_targets, measure_acceptance, name_served_sums
from draftworks.drafts.logit_losses import compare_labels, cross_entropy
from draftworks.drafts.objectives import LossSettings, soften
from draftworks.strategies.dflash.loss import BlockChunk

JUDGED = ("acceptance_sums", "tau_sums")
"""Metric sums that an evaluation takes at temperature 1."""


class Teacher(NamedTuple):
    """The target's last hidden states (B·S, H) and its head (V, H)."""

    last: Tensor
    head: Tensor

    def compute_distributions(self, positions: Tensor, dtype: torch.dtype, temperature: float = 1.0) -> Tensor:
        """Return softmax(logits / temperature) of the target, (l, V), at the positions (l,); once at equal positions."""
        positions, which = positions.unique(return_inverse=True)
        # The same operation as for the draft's logits: where both agree, their difference is 0 and not rounding.
        return soften(self._compute_logits(positions, dtype), temperature).softmax(-1).index_select(0, which)

    def measure_acceptance(self, positions: Tensor, logits: Tensor, served: Sequence[Decoding]) -> Tensor | None:
        """Return how likely a draft's tokens of logits (l, V) are accepted by each decoding, (d, l); None without one.

        Args:
            positions: (l,), where the target says the tokens at the draft's places.
        """
        if not served:
            return None
        positions, which = positions.unique(return_inverse=True)
        targets = find_served_targets(self._compute_logits(positions, logits.dtype), served)
        return measure_acceptance(logits, targets.index_select(1, which), served)

    def _compute_logits(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(self.last[positions].to(self.head.dtype), self.head).to(dtype)


class JudgedLabels(NamedTuple):
    """Of every label: cross-entropy at temperature 1, and ½‖q - p‖₁ at the teacher's, (…) each."""

    ce: Tensor
    distance: Tensor

    @property
    def acceptance(self) -> Tensor:
        """The probability that rejection sampling accepts a token drawn from p, (…), without gradient."""
        return (1 - self.distance.detach()).clamp(0, 1)


def judge_labels(logits: Tensor, labels: Tensor, q: Tensor, settings: LossSettings) -> JudgedLabels:
    """Return how labels (l,) fare under logits (…, l, V) whose teacher is q (l, V) at the temperature of the settings."""
    labels = labels.expand(logits.shape[:-1])
    ce, distance = compare_labels(soften(logits, settings.temperature), labels, q)
    return JudgedLabels(ce if settings.temperature == 1 else cross_entropy(logits, labels), distance)


def sum_judged(
    chunk: BlockChunk, acceptance: Tensor, served: Tensor | None, settings: LossSettings
) -> dict[str, Tensor]:
    """Return the metric sums of labels that are accepted with probability a (l,).

    Args:
        served: (d, l), what servers accept by each of `settings.served`; None without one.

    Returns:
        `acceptance_sums`, (k,), of a; `tau_sums`, (1,), Σ over blocks of a_1 + a_1·a_2 + …: the expected number of accepted
        proposals, had the proposals been the labels; and (k,) by each way to serve.
    """
    accepted = chunk.scatter(acceptance)
    sums = {"acceptance_sums": accepted.sum(0), "tau_sums": accepted.cumprod(1).sum()[None]}
    if served is None:
        return sums
    return sums | name_served_sums(settings.served, torch.stack([chunk.sum(each) for each in served]))
