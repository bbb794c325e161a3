"""DFlash's loss: weighted cross-entropy of the labels of blocks under a frozen head, in chunks of whole blocks.

Shapes: N blocks of k labels each, L of the N·k labels count; n, k and l are those of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.config.decoding import Decoding
from draftworks.drafts.logit_losses import (
    LossSums,
    SoftLabels,
    as_logits,
    at_least_float32,
    chunked_loss,
    compare_labels,
    cross_entropy,
    find_argmax,
    score_labels,
)
from draftworks.drafts.objectives import LossSettings
from draftworks.drafts.sampling import find_served_targets, measure_acceptance, name_served_sums
from draftworks.strategies.dflash.options import DFlashOptions

LabelWeighting = Callable[[Tensor, Tensor], Tensor]
"""From the cross-entropies (n, k) and the label mask (n, k) bool of whole blocks to the labels' loss weights (n, k)."""


class TaughtBlocks(NamedTuple):
    """The N blocks of a micro-batch with a label that counts, and what their losses are computed from.

    Attributes:
        states: (N, size, H) of the backbone, normed; the last k of a block propose.
        known: (N,) int64, the anchors' tokens.
        labels: (N, k) int64.
        label_mask: (N, k) bool, on at L labels.
        positions: (N, k) int64, the flat position, of (B, S), at which the target predicts each label.
        last: (B·S, H), the target's last hidden states; None where the strategy has no teacher.
        context: (N, H), the fused context before each anchor.
        has_context: (N,) bool, whether there is one.
    """

    states: Tensor
    known: Tensor
    labels: Tensor
    label_mask: Tensor
    positions: Tensor
    last: Tensor | None
    context: Tensor
    has_context: Tensor

    @property
    def proposing(self) -> Tensor:
        """The states that the labels that count are predicted from, (L, H)."""
        return self.states[:, -self.labels.shape[1] :][self.label_mask]

    @property
    def previous(self) -> Tensor:
        """The true tokens before the labels, (N, k) int64."""
        return torch.cat([self.known[:, None], self.labels[:, :-1]], dim=1)

    def sum_chunks(
        self,
        formula: Callable[..., LossSums],
        inputs: Sequence[Tensor | None],
        settings: LossSettings,
        shared: Sequence[Tensor] = (),
        passes: int = 1,
    ) -> LossSums:
        """Return `chunked_loss` of a formula over inputs of the labels that count, (L, …) each.

        Args:
            passes: sets of logits that the formula makes of a label.
        """
        at_once = max(1, settings.options.choose_chunk_blocks(self.states.device) // passes)
        return chunked_loss(formula, split_into_chunks(self.labels, self.label_mask, at_once), inputs, shared)


def block_cross_entropy(blocks: TaughtBlocks, head: Tensor, settings: LossSettings) -> LossSums:
    """Return the weighted cross-entropy of the labels that count under a frozen head (V, H)."""
    weigh = choose_weighting(settings.options)

    def formula(chunk: BlockChunk, states: Tensor) -> LossSums:
        ce, hits = score_labels(as_logits(F.linear(states, head)), chunk.labels)  # (l,) each, of logits (l, V)
        sums = {"acc_corrects": chunk.sum(hits), "loss_sums": chunk.sum(ce)}
        return LossSums(torch.dot(chunk.label_weights(weigh, ce), ce), sums)

    return blocks.sum_chunks(formula, [blocks.proposing], settings)


@dataclass(frozen=True)
class BlockChunk:
    """n whole blocks and their l labels that count; a `LossChunk`.

    Attributes:
        index: these labels among all L.
        label_mask: (n, k) bool, on at l labels.
        labels: (l,) int64.
    """

    index: slice
    label_mask: Tensor
    labels: Tensor

    def scatter(self, values: Tensor) -> Tensor:
        """Return one value per label (l,) at its place in (n, k), detached, 0 at labels that do not count."""
        zeros = torch.zeros(self.label_mask.shape, dtype=values.dtype, device=values.device)
        return zeros.masked_scatter_(self.label_mask, values.detach())

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums over blocks, by place, of one value per label: (l,) to (k,)."""
        return self.scatter(values).sum(0)

    def sum_prefixes(self, hits: Tensor) -> Tensor:
        """Return `sum_prefix_lengths` of labels (l,) bool, (1,)."""
        return sum_prefix_lengths(self.scatter(hits), self.label_mask)

    def label_weights(self, weigh: LabelWeighting, ce: Tensor) -> Tensor:
        """Return the loss weights (l,) from the cross-entropies (l,)."""
        return weigh(self.scatter(ce), self.label_mask)[self.label_mask].to(ce.dtype)


def split_into_chunks(labels: Tensor, label_mask: Tensor, chunk_blocks: int) -> Iterator[BlockChunk]:
    """Yield `chunk_blocks` blocks at a time, without chunks in which no label counts, but at least one chunk.

    Args:
        labels: (N, k) int64.
        label_mask: (N, k) bool.
    """
    labels_before = F.pad(label_mask.sum(1).cumsum(0), (1, 0)).tolist()  # of each block; last, of all
    if not labels_before[-1]:
        yield BlockChunk(slice(0, 0), label_mask[:0], labels[:0].flatten())
    chunk_begins = [*labels_before[::chunk_blocks], labels_before[-1]]
    for start, begin, end in zip(range(0, len(labels), chunk_blocks), chunk_begins, chunk_begins[1:]):
        if begin < end:
            blocks = slice(start, start + chunk_blocks)
            yield BlockChunk(slice(begin, end), label_mask[blocks], labels[blocks][label_mask[blocks]])


def is_argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which labels (l,) are the argmax of their logits (l, V), (l,) bool."""
    return find_argmax(logits) == labels


def sum_prefix_lengths(hits: Tensor, label_mask: Tensor) -> Tensor:
    """Return the total length of the correct prefixes of blocks, (1,), from hits (n, k).

    A label that does not count neither ends a prefix, as in SpecForge, nor lengthens it.
    """
    return ((hits | ~label_mask).cumprod(1) * hits).sum()[None]


def choose_place_weighting(options: DFlashOptions) -> LabelWeighting:
    """Return the weighting by place alone."""
    return uniform_weights if options.gamma is None else decaying_weights(options.gamma)


def choose_weighting(options: DFlashOptions) -> LabelWeighting:
    """Return the labels' loss weights, from the cross-entropies; constants for the gradient."""
    if options.weighting == "uniform":
        return choose_place_weighting(options)
    return dpace_weights(options.dpace_alpha, options.weighting)


def uniform_weights(ce: Tensor, label_mask: Tensor) -> Tensor:
    return label_mask.to(ce.dtype)


def decaying_weights(gamma: float) -> LabelWeighting:
    """Return the weighting of DFlash (arXiv 2602.06036): exp(-k / gamma) for label k of a block, k from 0."""

    def weigh(ce: Tensor, label_mask: Tensor) -> Tensor:
        places = torch.arange(ce.shape[1], device=ce.device, dtype=ce.dtype)
        return label_mask * torch.exp(-places / gamma)

    return weigh


def dpace_weights(alpha: float, variant: str) -> LabelWeighting:
    """Return the weighting of D-PACE.

    With p = exp(-CE) and s = (1 - alpha) p + alpha, 1 where a label does not count, the cumulative confidence of
    label k is prefix_k = Π_{j≤k} s_j, and its value Σ_{j≥k} prefix_j over the labels that count.

    Args:
        variant: `dpace` (the value), `dpace_cumulative_confidence` (the prefix) or `dpace_continuation_value`
            (value / prefix).
    """

    def weigh(ce: Tensor, label_mask: Tensor) -> Tensor:
        smoothed = torch.where(label_mask, (1 - alpha) * torch.exp(-ce) + alpha, 1.0)
        prefix = smoothed.cumprod(-1)
        value = (prefix * label_mask).flip(-1).cumsum(-1).flip(-1)
        weights = {
            "dpace": value,
            "dpace_cumulative_confidence": prefix,
            "dpace_continuation_value": value / prefix.clamp_min(torch.finfo(prefix.dtype).tiny),
        }
        return weights[variant] * label_mask

    return weigh


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
