"""Rung 4 of the acceptance ladder: speculative decoding with the target itself, and plain decoding, one prompt each."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator
from transformers import PreTrainedModel

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.drafts.sampling import Verdict, choose_token, verify
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.evaluation.ladder.differences import AnswerTrace, Difference
from draftworks.evaluation.ladder.prompt_acceptance import Pass, PromptAcceptance
from draftworks.evaluation.ladder.target_session import TargetPass, TargetSession
from draftworks.storage.identity import LayerTap

LOW_TEMPERATURE = 1 / 16
"""At this temperature a draft proposes its most likely tokens, and gaps up to 5 still have a probability in float32."""
MAX_TRIES = 16


def add_gap(
    difference: Difference,
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    prompt: Sequence[int],
    answer: Sequence[int],
) -> Difference:
    """Return the difference with its gap between the two largest logits, of the target or of the draft.

    Args:
        answer: tokens of the loop's answer to `prompt`.
    """
    if difference.place is None:
        gap = measure_target_gap(model, [*prompt, *answer[: difference.position]])
    else:
        known, proposed = difference.position - difference.place, difference.place
        gap = measure_draft_gap(model, strategy, taps, [*prompt, *answer[:known]], answer[known : known + proposed])
    return replace(difference, gap=gap)


def measure_target_gap(model: PreTrainedModel, tokens: Sequence[int]) -> float | None:
    """Return the target's gap for the token after `tokens`; None if the second largest logit is minus infinity."""
    largest = TargetSession(model).forward(tokens).logits[-1].double().topk(2).values
    return _finite(float(largest[0] - largest[1]))


def measure_draft_gap(
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    tokens: Sequence[int],
    proposed: Sequence[int],
) -> float | None:
    """Return the draft's gap for its next token, when `tokens` are decided and it has proposed `proposed` after them.

    A drafter returns no logits but the probabilities it drew from, q = softmax(logits / T). So it proposes at a
    temperature T so low that only near ties are open, and the gap is T · log(q1 / q2).

    Returns:
        None if the draft does not repeat `proposed`, or if the gap is too large for a probability.
    """
    features = TargetSession(model, taps, last=_reads_last(strategy)).forward(tokens[:-1]).features
    following = torch.tensor(tokens[1:], device=model.device)
    generator = Generator(model.device).manual_seed(0)
    for _ in range(MAX_TRIES):
        drafter = strategy.drafter()
        drafter.extend(features, following)
        proposal = drafter.propose(len(proposed) + 1, LOW_TEMPERATURE, generator)
        if proposal.probabilities is not None and proposal.tokens[:-1].tolist() == list(proposed):
            largest = proposal.probabilities[-1].double().topk(2).values
            return _finite(LOW_TEMPERATURE * float(largest.log().diff().neg()))
    return None


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None


@dataclass(frozen=True)
class DecodingLimits:
    """Where an answer ends: with one of `stop_ids`, which is part of it, or after `max_new_tokens`."""

    max_new_tokens: int
    stop_ids: Collection[int] = ()

    def within(self, max_new_tokens: int) -> DecodingLimits:
        """Return the same limits with at most `max_new_tokens` new tokens."""
        return replace(self, max_new_tokens=min(self.max_new_tokens, max_new_tokens))


@dataclass(frozen=True)
class DecodingResult:
    """Tokens of an answer, and the seconds that it took, with prefill."""

    tokens: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class SpeculativeDecodingResult(DecodingResult):
    """An answer by speculative decoding.

    Attributes:
        passes: passes of the target after the prefill, which gives the first token.
        acceptance: counts of these passes.
    """

    acceptance: PromptAcceptance
    passes: tuple[Pass, ...]

    @property
    def trace(self) -> AnswerTrace:
        return AnswerTrace(self.tokens, self.passes)


def _reads_last(strategy: DraftStrategy) -> bool:
    return "last" in strategy.feature_names


@dataclass
class _Answer:
    """Tokens of an answer so far."""

    limits: DecodingLimits
    tokens: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) >= self.limits.max_new_tokens or (
            bool(self.tokens) and self.tokens[-1] in self.limits.stop_ids
        )

    def extend(self, tokens: Sequence[int]) -> int:
        """Append the tokens up to the end of the answer; return how many were appended."""
        before = len(self.tokens)
        for token in tokens:
            if self.is_finished:
                break
            self.tokens.append(token)
        return len(self.tokens) - before


def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    limits: DecodingLimits,
    decoding: Decoding = GREEDY,
    generator: Generator | None = None,
) -> DecodingResult:
    """Decode an answer token by token, with a KV cache."""
    started = time.perf_counter()
    session, answer = TargetSession(model), _Answer(limits)
    logits = session.forward(prompt).logits[-1]
    answer.extend([choose_token(logits, decoding, generator)])
    while not answer.is_finished:
        logits = session.forward(answer.tokens[-1:]).logits[-1]
        answer.extend([choose_token(logits, decoding, generator)])
    return DecodingResult(tuple(answer.tokens), time.perf_counter() - started)


def speculate(
    model: PreTrainedModel,
    strategy: DraftStrategy,
    taps: Sequence[LayerTap],
    prompt: Sequence[int],
    limits: DecodingLimits,
    draft_tokens: int,
    decoding: Decoding = GREEDY,
    generator: Generator | None = None,
    sample_id: str = "",
) -> SpeculativeDecodingResult:
    """Decode an answer speculatively: the draft proposes `draft_tokens` tokens, the target verifies them in one pass.

    At temperature 0 the answer equals that of `decode`, up to rounding of the target's logits; above, its distribution
    is the same by every rule.

    Raises:
        ConfigError: the prompt is empty.
    """
    if not prompt:
        raise ConfigError("empty prompt: speculative decoding begins at the last prompt position")
    started = time.perf_counter()
    session = TargetSession(model, taps, rewinds=True, last=_reads_last(strategy))
    answer, drafter = _Answer(limits), strategy.drafter()
    target_pass = session.forward(prompt)
    session.rewind_to(len(prompt))
    answer.extend([choose_token(target_pass.logits[-1], decoding, generator)])
    following = torch.tensor(
        [*prompt[1:], answer.tokens[-1]], device=model.device
    )  # (n,), the token after each position
    length = len(prompt)
    passes: list[Pass] = []
    while not answer.is_finished:
        drafter.extend(target_pass.features, following)
        proposal = drafter.propose(draft_tokens, decoding.draft_temperature, generator)
        proposed = proposal.tokens.tolist()
        target_pass = session.forward([answer.tokens[-1], *proposed])  # logits (T + 1, V)
        verdict: Verdict = verify(proposal, target_pass.logits, decoding, generator)
        emitted_tokens = [*proposed[: verdict.accepted], verdict.next_token]
        passes.append(_make_pass(proposed, verdict.accepted, emitted=answer.extend(emitted_tokens)))
        kept = verdict.accepted + 1
        length += kept
        session.rewind_to(length)
        target_pass = TargetPass(
            target_pass.logits[:kept], {name: stream[:kept] for name, stream in target_pass.features.items()}
        )
        following = torch.tensor(emitted_tokens, device=model.device)
    seconds = time.perf_counter() - started
    return SpeculativeDecodingResult(
        tuple(answer.tokens), seconds, PromptAcceptance.of(sample_id, passes), tuple(passes)
    )


def _make_pass(proposed: Sequence[int], accepted: int, emitted: int) -> Pass:
    """Return the pass; accepted tokens after the end of the answer do not count."""
    rejected = proposed[accepted] if accepted < min(emitted, len(proposed)) else None
    return Pass(min(accepted, emitted), emitted, rejected)
