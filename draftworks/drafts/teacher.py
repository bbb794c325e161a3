"""The teacher: the target's next-token distributions, restricted to the draft's vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class TeacherChunk(NamedTuple):
    """Distributions and labels at m teacher positions.

    Attributes:
        kept: (n,) bool, which of the n positions asked for these are.
        q: (m, V_d), the target's distribution, renormalised over the draft vocabulary.
        labels: (m,) int64, the target's argmax as draft id; -1 outside the draft vocabulary.
        mass: (m,), the target's probability mass in the draft vocabulary; None if it was not asked for.
    """

    kept: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None


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

    @torch.no_grad()
    def compute_distributions(
        self, positions: Tensor, dtype: torch.dtype, with_mass: bool, with_unknown: bool
    ) -> TeacherChunk:
        """Return the distributions at the positions (n,), in `dtype`.

        The head runs in its own dtype, as in the target itself, so that the target's argmax is reproduced.

        Args:
            with_unknown: keep positions whose label is outside the draft vocabulary; otherwise they are left out.
        """
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)  # (n, V)
        labels = self.draft_index[logits.max(-1).indices]  # (n,)
        restricted = logits[:, self.draft_ids]  # (n, V_d)
        kept = labels >= 0
        if with_unknown:
            kept = torch.ones_like(kept)
        elif not kept.all():
            logits, restricted, labels = logits[kept] if with_mass else logits, restricted[kept], labels[kept]
        restricted = restricted.to(dtype)
        mass = None
        if with_mass:
            mass = restricted.logsumexp(-1).sub_(logits.to(dtype).logsumexp(-1)).exp_()
        return TeacherChunk(kept, restricted.softmax(-1), labels, mass)
