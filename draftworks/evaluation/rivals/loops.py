"""Answers that repeat themselves: measured by their n-grams. No torch.

The measure is seq-rep-n of Welleck et al. (2020, arXiv:1908.04319): 1 - distinct n-grams / all n-grams of a text, with
n = 4. A greedy answer that runs in a loop is cut off by its limit, and whatever copies is accepted there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftworks.data.tokenized import TokenRow
from draftworks.evaluation.ladder.answer_walk import find_answer_spans

NGRAM = 4
LOOP_SHARE = 0.5
"""Share of repeated n-grams from which on an answer is said to run in a loop."""
RUNS_IN_LOOP = "runs_in_loop"
"""Column of samples: whether their answers do."""


def measure_repetition(answers: Iterable[Sequence[int]]) -> float:
    """Return the share of n-grams that occurred before in the same answer, over all answers of a sample; 0 without one."""
    total = distinct = 0
    for answer in answers:
        ngrams = [tuple(answer[begin : begin + NGRAM]) for begin in range(len(answer) - NGRAM + 1)]
        total, distinct = total + len(ngrams), distinct + len(set(ngrams))
    return 1 - distinct / total if total else 0.0


def measure_repetition_of(sample: TokenRow) -> float:
    ids = sample.input_ids.tolist()
    return measure_repetition(ids[span.begin : span.end] for span in find_answer_spans(sample.loss_mask))


@dataclass(frozen=True)
class AnswerLoops:
    """How many samples of an eval set have answers that run in loops.

    Attributes:
        repeated: share of repeated n-grams, the mean over samples.
    """

    samples: int
    in_loops: int
    repeated: float

    @classmethod
    def of(cls, shares: Mapping[str, float]) -> AnswerLoops:
        """Count the samples, by the share of repeated n-grams of each."""
        return cls(
            len(shares),
            sum(share >= LOOP_SHARE for share in shares.values()),
            sum(shares.values()) / max(len(shares), 1),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ngram": NGRAM, "loop_share": LOOP_SHARE}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AnswerLoops:
        return cls(values["samples"], values["in_loops"], values["repeated"])
