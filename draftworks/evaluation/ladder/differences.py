"""First difference between the walk (rung 3) and the greedy loop (rung 4) on one answer.

Both give the same tokens and acceptances, except where rounding decides a near tie of two logits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import Pass


@dataclass(frozen=True)
class AnswerTrace:
    """One greedy answer of rung 3 or 4: its tokens, and the passes after the prefill, which gives the first token."""

    answer: tuple[int, ...]
    passes: tuple[Pass, ...]

    def to_json(self) -> dict[str, Any]:
        return {"answer": list(self.answer), "passes": [[one.accepted, one.rejected_token] for one in self.passes]}


@dataclass(frozen=True)
class Difference:
    """The first difference between two traces of one answer.

    Attributes:
        whose: `target` if the answers differ; `draft` if the answers are the same and the proposals differ.
        position: index in the answer, from 0, of the token that differs.
        walk, loop: that token on rung 3 and on rung 4; None if the answer had ended.
        pass_number, place: for a draft's difference, the index of the pass and of the proposed token, from 0.
        gap: difference of the two largest logits of `whose` at that token, in the loop; None if it is not known.
    """

    sample_id: str
    whose: Literal["target", "draft"]
    position: int
    walk: int | None
    loop: int | None
    pass_number: int | None = None
    place: int | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        if self.whose not in ("target", "draft"):
            raise DataError(f"sample {self.sample_id}: expected a difference of target or draft, found {self.whose!r}")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Difference:
        return cls(**values)


def first_difference(sample_id: str, walk: AnswerTrace, loop: AnswerTrace) -> Difference | None:
    """Return the first difference; None if both traces have the same tokens and the same acceptance in every pass."""
    if walk.answer != loop.answer:
        position = len(os.path.commonprefix([walk.answer, loop.answer]))
        tokens = [trace.answer[position] if position < len(trace.answer) else None for trace in (walk, loop)]
        return Difference(sample_id, "target", position, *tokens)
    before = 1
    for number, (walked, looped) in enumerate(zip(walk.passes, loop.passes)):
        if walked.accepted != looped.accepted:
            place = min(walked.accepted, looped.accepted)
            token = walk.answer[before + place]
            proposed = [token if one.accepted > place else one.rejected_token for one in (walked, looped)]
            return Difference(sample_id, "draft", before + place, *proposed, pass_number=number, place=place)
        before += walked.accepted + 1
    return None
