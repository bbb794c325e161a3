"""How many tokens of the eval answers are the target's own choice, and what that says of rungs 2 and 3. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

NEAR_TIE = 1 / 64
"""Two steps of bfloat16: the largest gap to the best logit, in shares of the larger of the two, that is called a near tie."""
MOST_UNEXPLAINED = 0.01
"""Largest share of answer tokens that differ and are no near ties, for which rounding may be the only cause."""


@dataclass(frozen=True)
class LabelCounts:
    """Answer tokens, those that are not the target's argmax, and those of these that are a near tie with it."""

    tokens: int
    differing: int
    near_ties: int

    @property
    def agreement(self) -> float:
        """The share of tokens that are the target's argmax; 0 without a token."""
        return (self.tokens - self.differing) / self.tokens if self.tokens else 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone can have made the differences."""
        return self.differing - self.near_ties <= MOST_UNEXPLAINED * self.tokens

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LabelCounts:
        return cls(**{name: int(values[name]) for name in ("tokens", "differing", "near_ties")})


class Exactness(StrEnum):
    """How far rungs 2 and 3 equal what greedy serving would accept.

    Attributes:
        ROUNDING: the answers are the target's greedy ones, and near ties were decided otherwise when they were read.
        UNEXPLAINED: they are, and more tokens differ than near ties explain.
        OTHER_ANSWERS: the answers are the data's own, or it is not known whose.
    """

    UNKNOWN = "unknown"
    EXACT = "exact"
    ROUNDING = "rounding"
    UNEXPLAINED = "unexplained"
    OTHER_ANSWERS = "other answers"


def judge_exactness(agreement: float | None, labels: LabelCounts | None, greedy_answers: bool | None) -> Exactness:
    """Return how exact rungs 2 and 3 are.

    Args:
        agreement: share of answer tokens that are the target's argmax; None if it is not known.
        labels: None in reports from before they were counted.
        greedy_answers: whether the target wrote the answers, greedily; None if it is not known.
    """
    if agreement is None:
        return Exactness.UNKNOWN
    if agreement >= 1:
        return Exactness.EXACT
    if not greedy_answers or labels is None:
        return Exactness.OTHER_ANSWERS
    return Exactness.ROUNDING if labels.is_rounding else Exactness.UNEXPLAINED
