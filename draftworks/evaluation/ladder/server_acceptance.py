"""Rung 6 of the acceptance ladder: what a live server accepts, beside the walk over the same answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from draftworks.data.token_rows import TokenRow
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.replay import find_answer_spans
from draftworks.evaluation.ladder.statistics import PairedDifference, Resampling, paired_difference
from draftworks.sglang.server_counters import SpeculatedAnswer

SERVER_METRIC = "rung6_server_acc_len"


@dataclass(frozen=True)
class ServerPrompt:
    """What a server is asked: the tokens before an answer of the eval set, and that answer.

    Attributes:
        max_new_tokens: most tokens of an answer, so that it ends where the eval set's does.
    """

    sample_id: str
    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class ServerMeasurement:
    """What a server accepted, sample by sample, in all answers of a sample together, as the walk counts them.

    Attributes:
        answers, identical_answers: how many were given, and how many are the eval set's own token for token.
        passes, tokens: as the answers' own counters and ids have them.
    """

    prompts: tuple[PromptAcceptance, ...]
    answers: int
    identical_answers: int
    passes: int
    tokens: int


@dataclass(frozen=True)
class WalkAgreement:
    """The live server against the walk.

    Attributes:
        paired: accepted tokens per pass, the server's minus the walk's.
        equal_samples: samples on which passes, accepted and emitted tokens are the same, count for count.
        tolerance: how far apart they may be whatever the interval says.
    """

    paired: PairedDifference
    equal_samples: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is small, or may be chance."""
        interval = self.paired.interval
        return abs(self.paired.difference) <= self.tolerance or interval.low <= 0 <= interval.high

    def to_json(self) -> dict[str, Any]:
        """`only_served` and `only_walked` are samples that were left out, being in one of the two alone."""
        paired = self.paired
        return {
            "difference": paired.difference,
            "interval": asdict(paired.interval),
            "prompts": paired.prompts,
            "only_served": paired.only_in_a,
            "only_walked": paired.only_in_b,
            "equal": self.equal_samples,
            "allowed": self.tolerance,
            "agrees": self.agrees,
        }


def build_server_prompts(
    rows: Iterable[TokenRow], samples: int, limits: DecodingLimits, max_length: int
) -> list[ServerPrompt]:
    """Every answer of the first `samples` samples by id, which is a hash: the same choice for every draft."""
    ordered = sorted(rows, key=lambda row: row.sample_id)
    return list(
        chain.from_iterable(islice(filter(None, (_of_row(row, limits, max_length) for row in ordered)), samples))
    )


def _of_row(row: TokenRow, limits: DecodingLimits, max_length: int) -> list[ServerPrompt]:
    ids = row.input_ids.tolist()
    return [
        ServerPrompt(
            row.sample_id,
            prompt=tuple(ids[:begin]),
            expected=tuple(ids[begin:end]),
            max_new_tokens=limits.within(max_length - begin).max_new_tokens,
        )
        for begin, end in find_answer_spans(row.loss_mask)
        if begin > 0
    ]


def ask_server(
    asked: Sequence[ServerPrompt],
    answer: Callable[[ServerPrompt], SpeculatedAnswer],
    at_a_time: int,
    answered: Callable[[SpeculatedAnswer], None] = lambda _: None,
) -> ServerMeasurement:
    """Ask a server everything, so many questions at a time. An error or interrupt waits for no answer.

    Args:
        answered: told of each answer as it comes, from the calling thread.
    """
    pool = ThreadPoolExecutor(at_a_time)
    try:
        waiting = [pool.submit(answer, question) for question in asked]
        for done in as_completed(waiting):
            answered(done.result())
        answers = [each.result() for each in waiting]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    accepted: dict[str, list[int]] = defaultdict(list)
    emitted: dict[str, int] = defaultdict(int)
    for question, found in zip(asked, answers, strict=True):
        accepted[question.sample_id] += found.accepted_per_pass()
        emitted[question.sample_id] += max(len(found.output_ids) - 1, 0)  # the prefill gave the first
    return ServerMeasurement(
        tuple(PromptAcceptance.from_accepted_counts(name, passes, emitted[name]) for name, passes in accepted.items()),
        answers=len(answers),
        identical_answers=sum(found.output_ids == question.expected for question, found in zip(asked, answers)),
        passes=sum(found.passes for found in answers),
        tokens=sum(len(found.output_ids) for found in answers),
    )


def compare_with_walk(
    served: Sequence[PromptAcceptance], walk: Sequence[PromptAcceptance], tolerance: float, resampling: Resampling
) -> WalkAgreement:
    """The server against the walk, on the samples that both have.

    Args:
        tolerance: as a share of the walk's tokens per pass.

    Raises:
        DataError: there is no such sample with a pass in both.
    """
    paired = paired_difference(served, walk, resampling=resampling)
    walked = {prompt.sample_id: prompt for prompt in walk}
    both = [(one, walked[one.sample_id]) for one in served if one.sample_id in walked]
    equal = sum(_counts(one) == _counts(other) for one, other in both)
    emitted, passes = (sum(getattr(other, name) for _, other in both) for name in ("emitted", "passes"))
    return WalkAgreement(paired, equal, tolerance * emitted / passes)


def _counts(prompt: PromptAcceptance) -> tuple[int, int, int]:
    return prompt.passes, prompt.accepted, prompt.emitted
