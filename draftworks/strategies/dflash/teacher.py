"""The target's own distributions at the labels of blocks, made again from its last hidden states; acceptance under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks
from draftworks.drafts.objectives import Temperatures, soften


class Teacher(NamedTuple):
    """The target's last hidden states (B·S, H) and its head (V, H)."""

    last: Tensor
    head: Tensor

    def compute_distributions(self, positions: Tensor, dtype: torch.dtype, temperature: float = 1.0) -> Tensor:
        """Return softmax(logits / temperature) of the target, (l, V), at the positions (l,); once at equal positions."""
        positions, which = positions.unique(return_inverse=True)
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)
        # The same operation as for the draft's logits: where both agree, their difference is 0 and not rounding.
        return soften(logits.to(dtype), temperature).softmax(-1).index_select(0, which)


class JudgedLosses(Protocol):
    """Sums of a loss that reads the target's distributions; a NamedTuple.

    `acceptance_sums` (k,) and `tau`, a scalar, are those of one temperature; `sampled` (m, k) are `acceptance_sums` at several.
    """

    @property
    def acceptance_sums(self) -> Tensor: ...

    @property
    def tau(self) -> Tensor: ...

    def _replace(self, **values: Any) -> Any: ...


J = TypeVar("J", bound=JudgedLosses)


def judge_acceptance(trained: J, temperatures: Temperatures, measure: Callable[[Temperatures], J]) -> J:
    """Return a loss's sums with the acceptance at the temperatures that an evaluation judges at; in training unchanged.

    `acceptance_sums` and `tau` are then those at temperature 1.

    Args:
        measure: returns the sums with the loss at a temperature.
    """
    if not temperatures.judged:
        return trained
    judged = temperatures.judge(trained, lambda each: measure(Temperatures(each)))
    sampled = torch.stack([each.acceptance_sums for each in judged])
    return trained._replace(acceptance_sums=sampled[0], tau=judged[0].tau, sampled=sampled)


def locate_teachers(blocks: Blocks, length: int) -> Tensor:
    """Return (B, A, size) int64: the flat position, of (B, length), at which the target predicts the label of place i.

    The label anchor + 1 + i is predicted at position anchor + i, which is the position of place i itself.
    """
    places = blocks.row_positions.unflatten(1, (-1, blocks.size))
    return places + torch.arange(len(places), device=places.device)[:, None, None] * length
