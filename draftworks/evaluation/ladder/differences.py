"""Where the walk (rung 3) and the greedy loop (rung 4) part. They say the same but for rounding, which decides near ties."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import Pass


@dataclass(frozen=True)
class AnswerTrace:
    """How one greedy answer came about, on rung 3 or 4: its tokens, and the passes after the prefill, which gives the first."""

    answer: tuple[int, ...]
    passes: tuple[Pass, ...]

    def to_json(self) -> dict[str, Any]:
        return {"answer": list(self.answer), "passes": [[one.accepted, one.rejected_token] for one in self.passes]}


@dataclass(frozen=True)
class Difference:
    """Where two courses of one answer part for the first time.

    Attributes:
        whose: `target` where it said another token; `draft` where the answers are the same and what it proposed is not.
        position: in the answer, from 0, of the token that was said or proposed.
        walk, loop: that token on rung 3 and on rung 4; None where the answer had ended.
        pass_number, place: of a draft's difference: which pass, and which of its proposals, both from 0.
        gap: between the two largest logits of whoever differed, there, in the loop; None where it is not known.
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
    """None where both say the same and accept the same in every pass."""
    if walk.answer != loop.answer:
        position = len(os.path.commonprefix([walk.answer, loop.answer]))
        said = [course.answer[position] if position < len(course.answer) else None for course in (walk, loop)]
        return Difference(sample_id, "target", position, *said)
    before = 1
    for number, (walked, looped) in enumerate(zip(walk.passes, loop.passes)):
        if walked.accepted != looped.accepted:
            place = min(walked.accepted, looped.accepted)
            token = walk.answer[before + place]
            proposed = [token if one.accepted > place else one.rejected_token for one in (walked, looped)]
            return Difference(sample_id, "draft", before + place, *proposed, pass_number=number, place=place)
        before += walked.accepted + 1
    return None
