"""The passes of a greedy server over an answer that is known, whatever proposes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from draftworks.evaluation.ladder.prompt_acceptance import Pass, PlacedPass


class AnswerSpan(NamedTuple):
    """An answer's tokens in its sample: [begin, end)."""

    begin: int
    end: int

    @property
    def first_asked(self) -> int:
        """Tokens of the sample that are known at the first pass: the prefill gives the answer's first token, and nothing
        can be said of the sample's own first two.
        """
        return max(self.begin, 1) + 1

    def make_pass(self, known: int, accepted: int, rejected: int | None = None) -> Pass:
        """Return the pass of which so many proposed tokens equal the answer's from place `known` on, up to its end."""
        remaining = self.end - known
        return Pass(accepted, min(accepted + 1, remaining), None if accepted == remaining else rejected)

    def walk(self, ask: Callable[[int], Pass]) -> Iterator[PlacedPass]:
        """Yield the passes of a server: each goes on after the accepted tokens and the target's own.

        Args:
            ask: returns the pass at which the first so many tokens of the sample are known.
        """
        known = self.first_asked
        while known < self.end:
            one = ask(known)
            yield PlacedPass(known, one)
            known += one.accepted + 1

    def walk_everywhere(self, ask: Callable[[int], Pass]) -> Iterator[Pass]:
        """Yield a pass at every token of the answer but the first."""
        for known in range(self.first_asked, self.end):
            yield ask(known)


def find_answer_spans(mask: np.ndarray) -> Iterator[AnswerSpan]:
    """Yield every run of True in an answer mask (S,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist()):
        yield AnswerSpan(begin, end)
