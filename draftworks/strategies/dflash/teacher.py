"""The target's own distributions at the labels of blocks, made again from its last hidden states; acceptance under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.config.decoding import Decoding
from draftworks.drafts.acceptance import find_served_targets, measure_acceptance, name_served_sums
from draftworks.drafts.logit_losses import SoftLabels, at_least_float32, compare_labels, cross_entropy
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import BlockChunk

JUDGED = ("acceptance_sums", "tau_sums")
"""Metric sums that an evaluation takes at temperature 1."""


class Teacher(NamedTuple):
    """The target's last hidden states (B·S, H) and its head (V, H)."""

    last: Tensor
    head: Tensor

    def teach(self, positions: Tensor, temperature: float = 1.0) -> SoftLabels:
        """Return the target's distributions at the positions (l,); its logits are made once at equal positions."""
        positions, which = positions.unique(return_inverse=True)
        # The same operation as for the draft's logits: where both agree, their difference is 0 and not rounding.
        return SoftLabels(self._compute_logits(positions), which, temperature)

    def measure_acceptance(self, positions: Tensor, logits: Tensor, served: Sequence[Decoding]) -> Tensor | None:
        """Return how likely a draft's tokens of logits (l, V) are accepted by each decoding, (d, l); None without one.

        Args:
            positions: (l,), where the target says the tokens at the draft's places.
        """
        if not served:
            return None
        positions, which = positions.unique(return_inverse=True)
        targets = find_served_targets(at_least_float32(self._compute_logits(positions)), served)
        return measure_acceptance(at_least_float32(logits), targets.index_select(1, which), served)

    def _compute_logits(self, positions: Tensor) -> Tensor:
        return F.linear(self.last[positions].to(self.head.dtype), self.head)


class JudgedLabels(NamedTuple):
    """Of every label: cross-entropy at temperature 1, and ½‖q - p‖₁ at the teacher's, (…) each."""

    ce: Tensor
    distance: Tensor

    @property
    def acceptance(self) -> Tensor:
        """The probability that rejection sampling accepts a token drawn from p, (…), without gradient."""
        return (1 - self.distance.detach()).clamp(0, 1)


def judge_labels(logits: Tensor, labels: Tensor, soft: SoftLabels, settings: LossSettings) -> JudgedLabels:
    """Return how labels (l,) fare under logits (…, l, V), which at a temperature other than 1 are read twice."""
    labels = labels.expand(logits.shape[:-1])
    if settings.temperature == 1:
        return JudgedLabels(*compare_labels(logits, labels, soft))
    distance = compare_labels(at_least_float32(logits) / settings.temperature, labels, soft).distance
    return JudgedLabels(cross_entropy(logits, labels), distance)


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
