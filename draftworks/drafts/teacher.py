"""What the target teaches: its distribution at a position, as far as the draft's vocabulary can tell it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Teacher(NamedTuple):
    """The target's side of the loss.

    Attributes:
        last: (N, H) last hidden states, post-norm.
        head: (V, H), frozen.
        draft_ids: (V_d,) int64, target id of every draft id, ascending.
        draft_index: (V,) int64, draft id of every target id, -1 outside the draft vocabulary.
    """

    last: Tensor
    head: Tensor
    draft_ids: Tensor
    draft_index: Tensor

    def lesson(self, positions: Tensor, dtype: torch.dtype, with_mass: bool, with_missed: bool = False) -> Lesson:
        """What the positions (n,) teach, in `dtype`.

        The head runs in its own dtype, as in the target itself, so that the target's argmax is reproduced.
        """
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)
        labels = self.draft_index[logits.max(-1).indices]
        known = labels >= 0
        kept = logits[:, self.draft_ids]
        missed = None
        if not known.all():
            if with_missed:
                missed = (kept[~known].to(dtype) - _log_sum_exp(logits[~known].to(dtype))).exp_()
            kept, labels = kept[known], labels[known]
        kept = kept.to(dtype)
        mass = _log_sum_exp(kept).sub_(_log_sum_exp(logits[known].to(dtype))).exp_() if with_mass else None
        return Lesson(known, kept.softmax(-1), labels, mass, missed)


class Lesson(NamedTuple):
    """What a chunk of teacher positions teaches: which of them have a label in the draft vocabulary, and for those
    the distribution (n, V_d), the label as draft id (n,), and the target's probability mass in the draft vocabulary
    (n, 1) where it is asked for. Of the others, where they are asked for and there are any, the target's probabilities of the
    draft's tokens, as they are (m, V_d)."""

    known: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None
    missed: Tensor | None = None

    def pupils(self, rows: Tensor) -> Pupils:
        """Hand it out to the rows (n,) of a step, -1 where a step has none for a position."""
        taught = (rows >= 0).nonzero().squeeze(1)
        if taught.numel() == rows.numel():
            return Pupils(rows, self.q, self.labels, self.mass)
        mass = None if self.mass is None else self.mass[taught]
        return Pupils(rows[taught], self.q.index_select(0, taught), self.labels[taught], mass)


class Pupils(NamedTuple):
    """The rows (n,) of one step that a lesson teaches, with their distributions, labels and masses."""

    rows: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None


def _log_sum_exp(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1, keepdim=True)
