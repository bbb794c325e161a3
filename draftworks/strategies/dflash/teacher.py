"""The target's own distributions at the labels of blocks, made again from its last hidden states; acceptance under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.config.decoding import Decoding
from draftworks.drafts.acceptance import find_served_targets, measure_acceptance
from draftworks.drafts.anchors import Blocks
from draftworks.drafts.objectives import Temperatures, soften


class Teacher(NamedTuple):
    """The target's last hidden states (B·S, H) and its head (V, H)."""

    last: Tensor
    head: Tensor

    def compute_distributions(self, positions: Tensor, dtype: torch.dtype, temperature: float = 1.0) -> Tensor:
        """Return softmax(logits / temperature) of the target, (l, V), at the positions (l,); once at equal positions."""
        positions, which = positions.unique(return_inverse=True)
        # The same operation as for the draft's logits: where both agree, their difference is 0 and not rounding.
        return soften(self._compute_logits(positions, dtype), temperature).softmax(-1).index_select(0, which)

    def measure_acceptance(self, positions: Tensor, logits: Tensor, served: Sequence[Decoding]) -> Tensor | None:
        """Return how likely a draft's tokens of logits (l, V) are accepted by each decoding, (d, l); None without one.

        Args:
            positions: (l,), where the target says the tokens at the draft's places.
        """
        if not served:
            return None
        positions, which = positions.unique(return_inverse=True)
        targets = find_served_targets(self._compute_logits(positions, logits.dtype), served)
        return measure_acceptance(logits, targets.index_select(1, which), served)

    def _compute_logits(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(self.last[positions].to(self.head.dtype), self.head).to(dtype)


class JudgedLosses(Protocol):
    """Sums of a loss that reads the target's distributions; a NamedTuple.

    `acceptance_sums` (k,) and `tau`, a scalar, are those of one temperature.
    """

    @property
    def acceptance_sums(self) -> Tensor: ...

    @property
    def tau(self) -> Tensor: ...

    def _replace(self, **values: Any) -> Any: ...


J = TypeVar("J", bound=JudgedLosses)


def judge_acceptance(trained: J, temperatures: Temperatures, measure: Callable[[Temperatures], J]) -> J:
    """Return a loss's sums, those of acceptance at temperature 1 in an evaluation; in training unchanged.

    Args:
        measure: returns the sums with the loss at other temperatures.
    """
    if not temperatures.evaluates:
        return trained
    at_1 = temperatures.judge(trained, measure)
    return trained._replace(acceptance_sums=at_1.acceptance_sums, tau=at_1.tau)


def locate_teachers(blocks: Blocks, length: int) -> Tensor:
    """Return (B, A, size) int64: the flat position, of (B, length), at which the target predicts the label of place i.

    The label anchor + 1 + i is predicted at position anchor + i, which is the position of place i itself.
    """
    places = blocks.row_positions.unflatten(1, (-1, blocks.size))
    return places + torch.arange(len(places), device=places.device)[:, None, None] * length
