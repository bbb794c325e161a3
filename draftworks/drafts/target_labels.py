"""The target's argmax at every taught position, found once in a training instead of in every epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from draftworks.drafts.documents import Documents
from draftworks.drafts.layers import argmax_of_head
from draftworks.drafts.objectives import mark_taught
from draftworks.features.contracts import TrainBatch

KEPT_BYTES = 256 << 20
"""Bytes of labels that a rank keeps: those of 64 million tokens. Labels beyond it are found anew each time."""


class TargetLabels:
    """Argmaxes of the target by sample id, int32 (P,) of the P taught positions of a sample, on the device of its batch.

    The logits of a sample are made by themselves, never together with those of other samples. So near ties fall the same
    way however samples are packed, batched, given to ranks, or read again after a resume.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept: dict[str, Tensor] = {}
        self._room = kept_bytes

    @torch.no_grad()
    def find(self, batch: TrainBatch, label_mask: Tensor, head: Tensor) -> Tensor:
        """Return the argmaxes (B·S,) int64 at all positions that may be taught; 0 elsewhere.

        Args:
            batch: with `last` (B, S, H).
            label_mask: (T, B, S) bool of all steps. A function of each sample alone: the same whenever it is read.
            head: (V, H), the target's.
        """
        names, documents, taught = batch.sample_ids, Documents.of(batch), mark_taught(label_mask).any(0)
        labels = torch.zeros(taught.numel(), dtype=torch.int64, device=taught.device)
        if not names:  # of a rank that has no sample in this step
            return labels
        if any(name not in self._kept for name in names):
            found = dict(zip(names, self._find_each(batch, taught, head, documents), strict=True))
            self._keep(found)
        else:
            found = self._kept
        # Samples lie in the batch in the order of their names, so their taught positions do.
        labels[taught.flatten()] = torch.cat([found[name] for name in names]).long()
        return labels

    def _find_each(self, batch: TrainBatch, taught: Tensor, head: Tensor, documents: Documents) -> list[Tensor]:
        samples = zip(batch.sample_ids, documents.split(batch["last"]), documents.split(taught), strict=True)
        return [
            self._kept[name] if name in self._kept else argmax_of_head(head, last[mask]).to(torch.int32)
            for name, last, mask in samples
        ]

    def _keep(self, found: dict[str, Tensor]) -> None:
        for name, labels in found.items():
            if name not in self._kept and labels.nbytes <= self._room:
                self._kept[name] = labels
                self._room -= labels.nbytes
