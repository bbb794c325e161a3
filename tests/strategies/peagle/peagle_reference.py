"""The loss and metric sums of P-EAGLE, one chain at a time, from the logits of its reader."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from reference_readers import chain_reader
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy
from draftworks.strategies.eagle3.reader import Eagle3Norms
from draftworks.strategies.peagle.reader import PEagleReader


def peagle_reader(strategy: DraftStrategy) -> PEagleReader:
    options = strategy.options
    norms = Eagle3Norms(norm_before_residual=options.norm_before_residual, fc_norm=options.fc_norm)
    first = chain_reader(strategy, norms, "layers.0.", options.sliding_window)
    return PEagleReader(first.taps, first.vocabulary, first.dtype, first, strategy.config()["mask_token_id"])


@dataclass
class Sums:
    """Of one sample: Σ CE, differentiable, positions with a label in the draft vocabulary, and right first choices by depth."""

    loss: Tensor
    labelled: int
    corrects: list[int]


def peagle_sums(strategy: DraftStrategy, sample: dict[str, Tensor], features: Tensor, kept: Tensor) -> Sums:
    """Over the chains of a sample that are `kept`, (D, S) by depth and anchor."""
    reader, ids = peagle_reader(strategy), sample["input_ids"]
    members = reader.vocabulary.ids
    total = Sums(loss=features.new_zeros(()), labelled=0, corrects=[0] * len(kept))
    for anchor in kept.any(0).nonzero()[:, 0].tolist():
        depths = kept[:, anchor].nonzero()[:, 0].tolist()
        asked = torch.zeros(1 + depths[-1], dtype=torch.int64)
        logits = reader.logits(features[: anchor + 1], ids[1 : anchor + 2], asked)  # (depths, V_d)
        for depth in depths:
            z = strategy.target.head @ sample["last"][anchor + depth + 1]
            if z.argmax() not in members:
                continue
            q = z[members].softmax(-1)
            total.loss = total.loss - (q * logits[depth].log_softmax(-1)).sum()
            total.labelled += 1
            total.corrects[depth] += int(logits[depth].argmax() == q.argmax())
    return total
