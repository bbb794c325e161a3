"""The table of bigrams on rungs 0 and 1, teacher-forced: measured as a chain draft is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftworks.drafts.documents import Documents
from draftworks.drafts.layers import argmax_of_head
from draftworks.drafts.objectives import make_teacher_plan
from draftworks.drafts.strategy import StepContext, StepOutput
from draftworks.evaluation.rivals.proposers import BigramTable
from draftworks.features.contracts import TrainBatch

MakeLabelMask = Callable[..., Tensor]
"""Maps a loss mask (B, S) and its `documents` to a label mask (T, B, S), as `ChainStrategy.chain_label_mask` does."""


class BigramDraft:
    """A draft without weights that is measured as a chain draft: same batches, labels and label mask, teacher-forced.

    Asked at position t, it knows at draft step i the tokens up to t+1+i and proposes `table[token t+1+i]` for token
    t+2+i. The proposal is correct if it is the target's argmax there. There is no loss: `loss_weight` is 0.

    Args:
        head: (V, H), the target's head, which is applied to the batch's `last`; on the device of the batches.
        make_label_mask: the function of the draft it is compared with.
    """

    def __init__(self, table: BigramTable, head: Tensor, make_label_mask: MakeLabelMask) -> None:
        self._successor = torch.from_numpy(table.successor).to(head.device)
        self._head = head
        self._make_label_mask = make_label_mask

    def __call__(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the metric sums of a batch with `input_ids` (B, S), `loss_mask` (B, S) and `last` (B, S, H)."""
        label_mask = self._make_label_mask(batch["loss_mask"], documents=Documents.of(batch))  # (T, B, S)
        plan = make_teacher_plan(label_mask)
        ids, last = (
            batch["input_ids"].flatten()[plan.teacher_positions],
            batch["last"].flatten(0, 1)[plan.teacher_positions],
        )  # (N,), (N, H)
        # All draft steps that predict the token after one position propose the same one: the table reads one token.
        correct = self._successor[ids] == argmax_of_head(self._head, last)  # (N,)
        metric_sums = {
            "acc_corrects": ((plan.draft_positions >= 0) & correct).sum(1, dtype=torch.float64),
            "acc_denoms": label_mask.sum(dim=(1, 2), dtype=torch.float64),
        }
        zero = torch.zeros((), device=ids.device)
        return StepOutput(zero, zero, metric_sums)
