"""Rung 6 of the acceptance ladder: acceptance by a live server, compared with the walk over the same answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from draftworks.data.tokenized import TokenRow
from draftworks.errors import EngineError
from draftworks.evaluation.ladder.answer_walk import find_answer_spans
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Resampling, compare_paired
from draftworks.servers.client import SpeculatedAnswer

SERVER_METRIC = "rung6_server_acc_len"
_TELLING_ANSWERS = 4
"""Answers of which another model begins one as the target does, by chance."""


@dataclass(frozen=True)
class ServerPrompt:
    """A prompt for a server: the tokens before an answer of the eval set, and that answer.

    Attributes:
        expected: tokens of the eval set's answer.
        max_new_tokens: limit that makes the server's answer end where the eval set's does.
    """

    sample_id: str
    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class ServerMeasurement:
    """Acceptance by a server per sample, over all answers of the sample, counted as the walk counts.

    Attributes:
        answers, identical_answers: number of answers, and of those that equal the eval set's token for token.
        common_beginnings: number of answers whose first token is the eval set's.
        passes, tokens: totals by the answers' counters and ids.
    """

    prompts: tuple[PromptAcceptance, ...]
    answers: int
    identical_answers: int
    common_beginnings: int
    passes: int
    tokens: int


@dataclass(frozen=True)
class RungAgreement:
    """Comparison of a live server with another rung on the same samples: the walk, or rung 4 of the same decoding.

    Attributes:
        paired: accepted tokens per pass, the server's minus the other's.
        equal_samples: number of samples with the same passes, accepted and emitted tokens in both.
        tolerance: difference that is allowed whatever the interval says.
    """

    paired: AcceptanceDifference
    equal_samples: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance, or its interval contains 0."""
        interval = self.paired.interval
        return abs(self.paired.difference) <= self.tolerance or interval.low <= 0 <= interval.high

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON; `only_served` and `only_walked` count samples that only one of the two has."""
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
    samples: Iterable[TokenRow], num_samples: int, limits: DecodingLimits, max_length: int
) -> list[ServerPrompt]:
    """Return a prompt for every answer of the first `num_samples` samples by id.

    Ids are hashes, so every draft gets the same prompts. Samples without a prompt before their answer are skipped.
    """
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    with_prompt = filter(None, (_build_prompts_of(sample, limits, max_length) for sample in ordered))
    return list(chain.from_iterable(islice(with_prompt, num_samples)))


def _build_prompts_of(sample: TokenRow, limits: DecodingLimits, max_length: int) -> list[ServerPrompt]:
    ids = sample.input_ids.tolist()
    return [
        ServerPrompt(
            sample.sample_id,
            prompt=tuple(ids[:begin]),
            expected=tuple(ids[begin:end]),
            max_new_tokens=limits.within(max_length - begin).max_new_tokens,
        )
        for begin, end in find_answer_spans(sample.loss_mask)
        if begin > 0
    ]


def select_first_answers(prompts: Sequence[ServerPrompt]) -> list[ServerPrompt]:
    """Return the first prompt of every sample, as rung 4 decodes it."""
    first: dict[str, ServerPrompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.sample_id, prompt)
    return list(first.values())


def require_same_target(prompts: Sequence[ServerPrompt], measured: ServerMeasurement, where: str) -> None:
    """Raise EngineError if no greedy answer of a running server has anything of the eval set's: it serves another model."""
    if measured.answers >= _TELLING_ANSWERS and not measured.common_beginnings:
        raise EngineError(
            f"{where}: none of {measured.answers} greedy answers begins with the token that the target began with: expected a "
            f"server of this target, found another model's answers to prompts such as {prompts[0].prompt[:8]}"
        )


def ask_server(
    prompts: Sequence[ServerPrompt],
    answer: Callable[[ServerPrompt], SpeculatedAnswer],
    concurrency: int,
    on_answer: Callable[[SpeculatedAnswer], None] = lambda _: None,
) -> ServerMeasurement:
    """Ask a server all prompts, `concurrency` at a time. An error or interrupt does not wait for running answers.

    Args:
        on_answer: called with each answer as it arrives, from the calling thread.
    """
    pool = ThreadPoolExecutor(concurrency)
    try:
        futures = [pool.submit(answer, prompt) for prompt in prompts]
        for done in as_completed(futures):
            on_answer(done.result())
        answers = [each.result() for each in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    accepted: dict[str, list[int]] = defaultdict(list)
    emitted: dict[str, int] = defaultdict(int)
    for prompt, found in zip(prompts, answers, strict=True):
        accepted[prompt.sample_id] += found.list_accepted_per_pass()
        emitted[prompt.sample_id] += max(len(found.output_ids) - 1, 0)  # the prefill gave the first token
    return ServerMeasurement(
        tuple(PromptAcceptance.from_accepted_counts(name, passes, emitted[name]) for name, passes in accepted.items()),
        answers=len(answers),
        common_beginnings=sum(found.output_ids[:1] == prompt.expected[:1] for prompt, found in zip(prompts, answers)),
        identical_answers=sum(found.output_ids == prompt.expected for prompt, found in zip(prompts, answers)),
        passes=sum(found.passes for found in answers),
        tokens=sum(len(found.output_ids) for found in answers),
    )


def compare_with_rung(
    served: Sequence[PromptAcceptance], rung: Sequence[PromptAcceptance], tolerance: float, resampling: Resampling
) -> RungAgreement:
    """Compare a server's acceptance with another rung's, on the samples that both have.

    Greedy answers are the same in both, so that counts can be equal. Sampled ones are drawn anew: only their expectation is,
    and the interval over samples covers what the draws add.

    Args:
        tolerance: allowed difference, as a share of the other rung's tokens per pass.

    Raises:
        DataError: no sample has a pass in both.
    """
    paired = compare_paired(served, rung, resampling)
    walked = {prompt.sample_id: prompt for prompt in rung}
    both = [(one, walked[one.sample_id]) for one in served if one.sample_id in walked]
    equal = sum(_counts(one) == _counts(other) for one, other in both)
    emitted, passes = (sum(getattr(other, name) for _, other in both) for name in ("emitted", "passes"))
    return RungAgreement(paired, equal, tolerance * emitted / passes)


def _counts(prompt: PromptAcceptance) -> tuple[int, int, int]:
    return prompt.passes, prompt.accepted, prompt.emitted
