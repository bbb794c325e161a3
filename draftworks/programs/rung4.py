"""Rung 4 of an evaluation run: cached measurements are read; the target is loaded only for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import EvaluateRun
from draftworks.config.server_rules import describe_servers
from draftworks.config.strategies import resolve_strategy
from draftworks.data.chat import ChatTokenizer
from draftworks.distributed.collectives import broadcast_from_rank_0, get_rank, run_on_every_rank
from draftworks.evaluation.acceptance_length import NAME, format_length
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.loop import (
    DecodingLoop,
    LoopCache,
    LoopIdentity,
    LoopLookup,
    Prompt,
    get_loop_revision,
)
from draftworks.evaluation.ladder.measurement import LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace, micro_mean
from draftworks.programs.assembly import Draft
from draftworks.storage.identity import digest


@dataclass(frozen=True, eq=False)
class Rung4:
    """Measures rung 4 of one draft.

    Attributes:
        weights_digest: of the draft in `draft.strategy`.
        walks: rung 3 of the prompts' answers, by sample id.
        log: prints a line; called on every rank.
    """

    run: EvaluateRun
    draft: Draft
    weights_digest: str
    prompts: Sequence[Prompt]
    walks: Mapping[str, AnswerTrace]
    draft_tokens: int
    device: torch.device
    log: Callable[[str], None]

    def measure(self) -> tuple[LoopMeasurement, ...]:
        """Return a measurement per decoding, from the cache or by decoding. A collective.

        Raises:
            StoreError: the folder of the cache cannot be used.
        """
        if not self.prompts:
            return ()
        decodings = self.run.evaluation.loop.list_decodings(self.run.strategy)
        identities = [self._make_identity(decoding) for decoding in decodings]
        cache = self._on_rank_0(self._open_cache)
        found: list[LoopLookup] = self._on_rank_0(
            lambda: [LoopLookup() if cache is None else cache.find(i) for i in identities]
        )
        loops = []
        for identity, one in zip(identities, found):
            if one.problem is not None:
                self.log(f"rung 4 is measured anew: {one.problem}")
            measured = one.measurement or self._decode_and_store(identity, cache)
            loops.append(measured)
            self.log(_format_measurement(self.run.strategy, measured, cached=one.measurement is not None))
        return tuple(loops)

    def _decode_and_store(self, identity: LoopIdentity, cache: LoopCache | None) -> LoopMeasurement:
        """Decode, and store the measurement at once, so that a later interruption does not lose it."""
        walks = self.walks if identity.decoding == GREEDY else None
        measured = self._loop.measure(self.prompts, identity.decoding, walks)
        self._on_rank_0(lambda: None if cache is None else cache.store(identity, measured))
        return measured

    @cached_property
    def _loop(self) -> DecodingLoop:
        """The loop with the target, which is loaded on first use."""
        from draftworks.capture.engines.hf import load_hf_engine

        run, target = self.run, self.run.target
        engine = load_hf_engine(target, CaptureSpec(compute_dtype=run.evaluation.loop.compute_dtype), self.device)
        taps = resolve_strategy(run.strategy).taps(target.num_layers, self.draft.options)
        return DecodingLoop(
            engine.model, self.draft.strategy, taps, self._limits, self.draft_tokens, run.seed, run.max_length
        )

    @cached_property
    def _limits(self) -> DecodingLimits:
        return DecodingLimits(self.run.max_new_tokens, ChatTokenizer.load(self.run.target).eos_ids)

    def _make_identity(self, decoding: Decoding) -> LoopIdentity:
        return LoopIdentity(
            weights_digest=self.weights_digest,
            strategy=self.run.strategy,
            options=self.draft.options.to_identity(),
            target_digest=self.run.target.digest,
            prompts=self._digest_prompts(compared=decoding == GREEDY),
            decoding=decoding,
            draft_tokens=self.draft_tokens,
            stop_ids=tuple(self._limits.stop_ids),
            max_new_tokens=self._limits.max_new_tokens,
            max_length=self.run.max_length,
            compute_dtype=self.run.evaluation.loop.compute_dtype,
            seed=self.run.seed,
            revision=get_loop_revision(self.run.target),
        )

    def _digest_prompts(self, compared: bool) -> str:
        """Return the digest of the prompts, and of the walks if the loop is compared with them."""
        asked = [[prompt.sample_id, list(prompt.tokens)] for prompt in self.prompts]
        return digest(
            [asked, [self.walks[prompt.sample_id].to_json() for prompt in self.prompts] if compared else None]
        )

    def _open_cache(self) -> LoopCache | None:
        return None if self.run.loop_cache is None else LoopCache.open(self.run.loop_cache)

    @staticmethod
    def _on_rank_0(action: Callable[[], object]):
        """Run `action` on rank 0, and return its result, or raise its error, on every rank."""
        return broadcast_from_rank_0(run_on_every_rank(lambda: action() if get_rank() == 0 else None))


def _format_measurement(strategy: str, loop: LoopMeasurement, cached: bool) -> str:
    rule = loop.decoding.rule
    text = (
        f"{NAME} {format_length(micro_mean(loop.prompts) or 0.0, 3)} in the real loop, {loop.decoding.describe()}"
        f"{'' if rule is None else f', by {rule} ({describe_servers(strategy, rule)})'} (rung 4)"
    )
    if not cached or loop.timing_context is None:
        return text
    return f"{text}; cached, measured on {loop.timing_context.device} at {loop.timing_context.date:%Y-%m-%d %H:%M %Z}"
