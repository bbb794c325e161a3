"""The target's own distributions at the labels of blocks, made again from its last hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks


class Teacher(NamedTuple):
    """The target's last hidden states (B·S, H) and its head (V, H)."""

    last: Tensor
    head: Tensor

    def compute_distributions(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the target's distributions (l, V) at the positions (l,); at equal positions they are computed once."""
        positions, which = positions.unique(return_inverse=True)
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)
        # The same operations as for the draft's logits: where both agree, their difference is 0 and not rounding.
        return logits.to(dtype).log_softmax(-1).exp().index_select(0, which)


def locate_teachers(blocks: Blocks, length: int) -> Tensor:
    """Return (B, A, size) int64: the flat position, of (B, length), at which the target predicts the label of place i.

    The label anchor + 1 + i is predicted at position anchor + i, which is the position of place i itself.
    """
    places = blocks.row_positions.unflatten(1, (-1, blocks.size))
    return places + torch.arange(len(places), device=places.device)[:, None, None] * length
