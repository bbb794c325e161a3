"""Target forward passes over one sequence with a cache that can be rewound, for layers of any kind."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Generator, Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.sampling import Verdict, choose_token, verify
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace, Difference, Pass, PromptAcceptance
from draftworks.storage.identity import LayerTap

_CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Cache layers that store something for each token, so that the last tokens can be removed."""


@dataclass(frozen=True)
class TargetPass:
    """Output for n tokens: logits (n, V) and features (n, H) by name."""

    logits: Tensor
    features: dict[str, Tensor]


class TargetSession:
    """A target and its cache over one sequence.

    Recurrent layers, such as the gated delta rule of Qwen3-Next and Qwen3.5, cannot forget single tokens: `crop` of
    transformers leaves their state as it is. So their state before a pass is copied, and after a rewind the tokens of
    the pass that remain are computed again.

    Args:
        taps: residual streams to return with the logits.
        rewinds: whether `rewind_to` is called after every `forward`. Layers with a sliding window keep more until then.
        last: return the last hidden states, after the final norm, with the streams.
    """

    def __init__(
        self, model: PreTrainedModel, taps: Sequence[LayerTap] = (), rewinds: bool = False, last: bool = False
    ) -> None:
        self._model = model
        self._taps = tuple(taps)
        self._last_hidden = last
        self._cache = DynamicCache(config=model.config)
        self._recurrent = [index for index, layer in enumerate(self._cache.layers) if type(layer) not in _CROPPABLE]
        self._rewinds = rewinds
        self._known = 0
        self._last: tuple[int, ...] = ()
        if rewinds:
            for layer in self._croppable_layers:
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.activate_past_recording()

    @torch.no_grad()
    def forward(self, tokens: Sequence[int]) -> TargetPass:
        """Run the target over the tokens that follow those in the cache."""
        if self._rewinds:
            self._before = {index: deepcopy(self._cache.layers[index]) for index in self._recurrent}
            self._last = tuple(tokens)
        self._known += len(tokens)
        out = self._model(
            input_ids=self._ids(tokens),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=bool(self._taps) or self._last_hidden,
        )
        features = {tap.name: out.hidden_states[tap.hf_index][0] for tap in self._taps}  # (1, n, H) to (n, H)
        if self._last_hidden:
            features["last"] = out.hidden_states[-1][0]
        return TargetPass(out.logits[0], features)

    @torch.no_grad()
    def rewind_to(self, length: int) -> None:
        """Remove all tokens after the first `length`; these must all be of the last pass."""
        rejected, self._known = self._known - length, length
        if not rejected or not self._recurrent:
            self._crop(rejected)
            return
        self._crop(len(self._last))
        for index, layer in self._before.items():
            self._cache.layers[index] = layer
        kept = self._last[: len(self._last) - rejected]
        if kept:
            self._model.base_model(input_ids=self._ids(kept), past_key_values=self._cache, use_cache=True)
            self._crop(0)

    @property
    def _croppable_layers(self) -> list[DynamicLayer]:
        layers = [layer for index, layer in enumerate(self._cache.layers) if index not in self._recurrent]
        return cast(list[DynamicLayer], layers)

    def _crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens; layers with a window shrink to it again, also if `tokens` is 0."""
        for layer in self._croppable_layers:
            layer.crop(-tokens)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self._model.device)  # (1, n)


def has_recurrent_state(target: TargetFiles) -> bool:
    """Whether some layers of a target keep one state for all tokens (recurrent layers). Reads its config.json only."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        target.model, revision=target.revision or "main", trust_remote_code=False
    )
    layers = DynamicCache(config=config).layers
    return any(type(layer) not in _CROPPABLE for layer in layers)


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
