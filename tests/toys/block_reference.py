"""Losses and metric sums of block drafts, one block at a time, from the logits of their readers.

A strategy's cases say what one block adds; here is what is the same for all: blocks, weights of labels, and how sums add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from strategy_cases import HALFWAY, NAMES, Sample, Sums, side_by_side
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import draw_blocks
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.export.readers.reader import ExportReader


@dataclass(frozen=True)
class LabelledBlock:
    """One block of a sample: what a reader is asked, the k labels with their mask, and the target's states that teach them."""

    features: Tensor
    next_tokens: Tensor
    labels: Tensor
    label_mask: Tensor
    last: Tensor

    @classmethod
    def at(cls, anchor: int, one: Sample, features: Tensor, places: int, contiguous: bool) -> LabelledBlock:
        """The block at an anchor.

        Args:
            contiguous: whether labels count up to the first position that is not supervised, or wherever they are.
        """
        ids, mask = one["input_ids"], one["loss_mask"]
        padded = torch.cat([mask, mask.new_zeros(places)])[anchor + 1 : anchor + 1 + places]
        labels = torch.cat([ids, ids.new_zeros(places)])[anchor + 1 : anchor + 1 + places]
        label_mask = padded.long().cumprod(0).bool() if contiguous else padded
        last = F.pad(one["last"], (0, 0, 0, places))[anchor : anchor + places] if "last" in one else features[:0]
        return cls(features[:anchor], ids[1 : anchor + 1], labels, label_mask, last)

    @property
    def asked(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.features, self.next_tokens, self.labels

    def cross_entropies(self, logits: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(1, self.labels[:, None]).squeeze(1)

    def teach(self, head: Tensor) -> Tensor:
        """The target's distributions at the labels, (k, V)."""
        return (self.last @ head.T).softmax(-1)


def weigh(options: Any, ce: Tensor, counted: Tensor) -> Tensor:
    """Return the weight of every label, (k,), by the options `weighting`, `gamma` and `dpace_alpha`."""
    ce = ce.detach()
    if options.weighting == "uniform":
        decay = [1.0 if options.gamma is None else math.exp(-k / options.gamma) for k in range(len(ce))]
        return torch.tensor(decay, dtype=ce.dtype) * counted
    smooth = [(1 - options.dpace_alpha) * math.exp(-float(c)) + options.dpace_alpha if on else 1.0
              for c, on in zip(ce, counted)]  # fmt: skip
    prefix = [math.prod(smooth[: k + 1]) for k in range(len(ce))]
    value = [sum(p for p, on in zip(prefix[k:], counted[k:]) if on) for k in range(len(ce))]
    chosen = {
        "dpace": value,
        "dpace_cumulative_confidence": prefix,
        "dpace_continuation_value": [v / p for v, p in zip(value, prefix)],
    }[options.weighting]
    return torch.tensor(chosen, dtype=ce.dtype) * counted


@dataclass
class BlockSums(Sums):
    """The sums while blocks are added to them."""

    block: LabelledBlock = None  # pyright: ignore[reportAssignmentType]

    def count(self, **values: Tensor) -> None:
        """Add (k,) values of the labels that count, by place."""
        for name, each in values.items():
            each = each.detach().double() * self.block.label_mask
            self.by_place[name] = self.by_place.get(name, torch.zeros_like(each)) + each

    def measure(self, **rights: Tensor) -> None:
        """Add how many labels, of those that count, lead a block up to the first that is not right, (k,) bool."""
        mask = self.block.label_mask
        for name, right in rights.items():
            leading = ~(mask & ~right).long().cummax(0).values.bool()
            self.by_block[name] += int((mask & leading).sum())

    def expect(self, tau: Tensor) -> None:
        """Add how many proposals are expected to be accepted, of probabilities (k,)."""
        self.by_block["tau"] += float((tau.detach() * self.block.label_mask).cumprod(0).sum())


AddBlock = Callable[[BlockSums, Any, Any, StepContext], None]
"""From the sums so far, with the block, the reader and the options."""


def expect_blocks(
    add: AddBlock, read: Callable[[DraftStrategy], ExportReader], contiguous: bool = False
) -> Callable[[DraftStrategy, list[Sample], StepContext], Sums]:
    """Return `StrategyCases.expect` of a strategy one of whose blocks adds what `add` says."""

    def expect(strategy: DraftStrategy, samples: list[Sample], ctx: StepContext) -> Sums:
        options, reader = strategy.options, read(strategy)
        anchors = anchors_drawn(strategy, strategy.collate(samples, NAMES[: len(samples)]), ctx)
        total = BlockSums(samples[0][strategy.feature_names[0]].new_zeros(()))
        for one, drawn in zip(samples, anchors, strict=True):
            features = side_by_side(strategy, one)
            for anchor in drawn:
                up_to_end = contiguous or options.loss == "token_mean"
                total.block = LabelledBlock.at(anchor, one, features, strategy.max_draft_tokens, up_to_end)
                total.count(acc_denoms=total.block.label_mask)
                total.by_block["blocks"] += int(total.block.label_mask.any())
                add(total, reader, options, ctx)
        return total

    return expect


def anchors_drawn(strategy: DraftStrategy, batch: Any, ctx: StepContext = HALFWAY) -> list[list[int]]:
    mask, options = batch["loss_mask"], strategy.options
    candidates = mask & F.pad(mask[:, 1:], (0, 1), value=False)
    seeds, step = (batch["draws"], ctx.global_step) if ctx.training else (batch["eval_draws"], 0)
    blocks = draw_blocks(candidates, seeds, step, options.num_anchors, options.block_size)
    return [row[on].tolist() for row, on in zip(blocks.anchors, blocks.live)]
