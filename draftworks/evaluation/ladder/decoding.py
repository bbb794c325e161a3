"""Rung 4 of the acceptance ladder: real speculative decoding with the target, beside plain decoding, one prompt at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from draftworks.drafts.sampling import Verdict, distribution, draw, verify
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.evaluation.ladder.differences import AnswerTrace, Difference
from draftworks.evaluation.ladder.prompt_acceptance import Pass, PromptAcceptance
from draftworks.evaluation.ladder.target_session import TargetPass, TargetSession
from draftworks.storage.identity import LayerTap

LOW_TEMPERATURE = 1 / 16
"""A temperature at which a draft says its best guesses, and at which gaps up to 5 have probabilities in float32."""
MAX_TRIES = 16


def add_gap(
    difference: Difference,
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    prompt: Sequence[int],
    answer: Sequence[int],
) -> Difference:
    """The difference with its gap, of the target or of the draft.

    Args:
        answer: to `prompt`, as the loop gave it.
    """
    if difference.place is None:
        gap = measure_target_gap(model, [*prompt, *answer[: difference.position]])
    else:
        said, guesses = difference.position - difference.place, difference.place
        gap = measure_draft_gap(model, strategy, taps, [*prompt, *answer[:said]], answer[said : said + guesses])
    return replace(difference, gap=gap)


def measure_target_gap(model: PreTrainedModel, tokens: Sequence[int]) -> float | None:
    """Of what the target says after `tokens`; None where the second largest logit is minus infinity."""
    largest = TargetSession(model).forward(tokens).logits[-1].double().topk(2).values
    return _finite(float(largest[0] - largest[1]))


def measure_draft_gap(
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    tokens: Sequence[int],
    guesses: Sequence[int],
) -> float | None:
    """Of what the draft proposes next, when the target has said `tokens` and it has proposed `guesses` after them.

    A drafter hands out no logits but the probabilities it drew from, q = softmax(logits / T). So it is asked at a
    temperature T that leaves doubt about near ties only, and the gap is T · log(q1 / q2).

    Returns:
        None where the draft did not repeat these guesses, or where the gap is too large for a probability.
    """
    features = TargetSession(model, taps).forward(tokens[:-1]).features
    following = torch.tensor(tokens[1:], device=model.device)
    generator = Generator(model.device).manual_seed(0)
    for _ in range(MAX_TRIES):
        drafter = strategy.drafter()
        drafter.extend(features, following)
        proposal = drafter.propose(len(guesses) + 1, LOW_TEMPERATURE, generator)
        if proposal.tokens[:-1].tolist() == list(guesses):
            likeliest = proposal.probabilities[-1].double().topk(2).values
            return _finite(LOW_TEMPERATURE * float(likeliest.log().diff().neg()))
    return None


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None


@dataclass(frozen=True)
class DecodingLimits:
    """When an answer ends: at one of `stop_ids`, which belongs to it, or after `max_new_tokens`."""

    max_new_tokens: int
    stop_ids: Collection[int] = ()

    def within(self, room: int) -> DecodingLimits:
        """The same, with at most `room` new tokens."""
        return replace(self, max_new_tokens=min(self.max_new_tokens, room))


@dataclass(frozen=True)
class DecodingResult:
    """An answer, and the seconds it took, prefill included."""

    tokens: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class SpeculativeDecodingResult(DecodingResult):
    """`passes` are those after the prefill, which gives the first token; `acceptance` counts them."""

    acceptance: PromptAcceptance
    passes: tuple[Pass, ...]

    @property
    def trace(self) -> AnswerTrace:
        return AnswerTrace(self.tokens, self.passes)


@dataclass
class _Answer:
    """What has been said, and whether it is over."""

    limits: DecodingLimits
    tokens: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return len(self.tokens) >= self.limits.max_new_tokens or (
            bool(self.tokens) and self.tokens[-1] in self.limits.stop_ids
        )

    def say(self, tokens: Sequence[int]) -> int:
        """As many of these as belong to the answer; returns how many."""
        before = len(self.tokens)
        for token in tokens:
            if self.over:
                break
            self.tokens.append(token)
        return len(self.tokens) - before


def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    limits: DecodingLimits,
    temperature: float = 0.0,
    generator: Generator | None = None,
) -> DecodingResult:
    """Plain decoding with a cache."""
    started = time.perf_counter()
    session, answer = TargetSession(model), _Answer(limits)
    logits = session.forward(prompt).logits[-1]
    answer.say([_next(logits, temperature, generator)])
    while not answer.over:
        logits = session.forward(answer.tokens[-1:]).logits[-1]
        answer.say([_next(logits, temperature, generator)])
    return DecodingResult(tuple(answer.tokens), time.perf_counter() - started)


def speculate(
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    prompt: Sequence[int],
    limits: DecodingLimits,
    count: int,
    temperature: float = 0.0,
    generator: Generator | None = None,
    sample_id: str = "",
) -> SpeculativeDecodingResult:
    """Speculative decoding: the draft proposes `count` tokens, the target verifies them in one pass.

    Greedy, the answer is that of `decode` token for token, to rounding of the target's logits; at a temperature it has the
    same distribution.

    Raises:
        ConfigError: an empty prompt.
    """
    if not prompt:
        raise ConfigError("a prompt of no tokens: speculative decoding begins at the last prompt position")
    started = time.perf_counter()
    session, answer, drafter = TargetSession(model, taps, rewinds=True), _Answer(limits), strategy.drafter()
    seen = session.forward(prompt)
    session.rewind_to(len(prompt))
    answer.say([_next(seen.logits[-1], temperature, generator)])
    following = torch.tensor([*prompt[1:], answer.tokens[-1]], device=model.device)
    known = len(prompt)
    passes: list[Pass] = []
    while not answer.over:
        drafter.extend(seen.features, following)
        proposal = drafter.propose(count, temperature, generator)
        proposed = proposal.tokens.tolist()
        seen = session.forward([answer.tokens[-1], *proposed])
        verdict: Verdict = verify(proposal, seen.logits, temperature, generator)
        said = [*proposed[: verdict.accepted], verdict.next_token]
        passes.append(_pass(proposed, verdict.accepted, emitted=answer.say(said)))
        rows = verdict.accepted + 1
        known += rows
        session.rewind_to(known)
        seen = TargetPass(seen.logits[:rows], {name: stream[:rows] for name, stream in seen.features.items()})
        following = torch.tensor(said, device=model.device)
    seconds = time.perf_counter() - started
    return SpeculativeDecodingResult(
        tuple(answer.tokens), seconds, PromptAcceptance.of(sample_id, passes), tuple(passes)
    )


def _pass(proposed: Sequence[int], accepted: int, emitted: int) -> Pass:
    """Where the answer ended within what was accepted, the rest of it does not count."""
    rejected = proposed[accepted] if accepted < min(emitted, len(proposed)) else None
    return Pass(min(accepted, emitted), emitted, rejected)


def _next(logits: Tensor, temperature: float, generator: Generator | None) -> int:
    return int(logits.argmax() if temperature == 0 else draw(distribution(logits, temperature), generator))
