"""Rung 4 over many prompts, which the ranks share."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from transformers import PreTrainedModel

from draftworks.config.decoding import Decoding
from draftworks.config.run_files import TargetFiles
from draftworks.distributed.collectives import broadcast_from_rank_0, gather_from_ranks, get_rank, get_world_size
from draftworks.drafts.strategy import DraftStrategy
from draftworks.evaluation.ladder.decoding import DecodingLimits, add_gap, decode, speculate
from draftworks.evaluation.ladder.differences import AnswerTrace, Difference, first_difference
from draftworks.evaluation.ladder.measurement import LoopMeasurement, TimingContext
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.prompts import Prompt
from draftworks.evaluation.ladder.target_session import has_recurrent_state
from draftworks.storage.identity import LayerTap, digest

LOOP_REVISION = 1
"""Increase it when a change of this module, of `decoding` or of a drafter changes the counts for the same inputs."""
_RECURRENT_REVISION = 2
"""For targets with recurrent layers: revision 1 did not restore their state after a rejected token."""


def get_loop_revision(target: TargetFiles) -> int:
    """Return the revision of the loop's code for this target. Reads the target's config."""
    return _RECURRENT_REVISION if has_recurrent_state(target) else LOOP_REVISION


@dataclass(frozen=True)
class DecodingLoop:
    """A target and its draft, decoding together.

    Attributes:
        draft_tokens: tokens proposed per pass.
        max_length: length at which samples of the eval set were cut, so that both rungs end answers there; None if
            they were not cut.
    """

    model: PreTrainedModel
    strategy: DraftStrategy
    taps: Sequence[LayerTap]
    limits: DecodingLimits
    draft_tokens: int
    seed: int
    max_length: int | None = None

    def measure(
        self, prompts: Sequence[Prompt], decoding: Decoding, walks: Mapping[str, AnswerTrace] | None = None
    ) -> LoopMeasurement:
        """Decode every prompt with and without the draft, one prompt at a time; ranks share them. A collective.

        Args:
            walks: rung 3 of these prompts' answers by sample id, to list differences; at temperature 0 only.
        """
        share = prompts[get_rank() :: get_world_size()]
        for prompt in share[:1]:
            self._measure_prompt(prompt, decoding)  # warm-up: the first prompt also pays for one-time setup
        mine = [
            self._measure_prompt(prompt, decoding, None if walks is None else walks[prompt.sample_id])
            for prompt in share
        ]
        shares = gather_from_ranks(mine)
        parts = sorted((part for share in shares for part in share), key=lambda part: part.acceptance.sample_id)
        found = tuple(part.difference for part in parts if part.difference is not None)
        return LoopMeasurement(
            decoding,
            tuple(part.acceptance for part in parts),
            seconds=sum(part.seconds for part in parts),
            plain_seconds=sum(part.plain_seconds for part in parts),
            tokens=sum(part.tokens for part in parts),
            plain_tokens=sum(part.plain_tokens for part in parts),
            differences=None if walks is None else found,
            timing_context=broadcast_from_rank_0(current_timing_context(self.model.device)),
        )

    def _measure_prompt(self, prompt: Prompt, decoding: Decoding, walk: AnswerTrace | None = None) -> _Part:
        limits = self.limits
        if self.max_length is not None:
            limits = limits.within(self.max_length - len(prompt.tokens))
        plain = decode(self.model, prompt.tokens, limits, decoding, self._generator(prompt))
        speculative = speculate(
            self.model,
            self.strategy,
            self.taps,
            prompt.tokens,
            limits,
            self.draft_tokens,
            decoding,
            self._generator(prompt),
            prompt.sample_id,
        )
        difference = None if walk is None else self._find_difference(prompt, walk, speculative.trace)
        return _Part(
            speculative.acceptance,
            speculative.seconds,
            plain.seconds,
            len(speculative.tokens),
            len(plain.tokens),
            difference,
        )

    def _find_difference(self, prompt: Prompt, walk: AnswerTrace, loop: AnswerTrace) -> Difference | None:
        found = first_difference(prompt.sample_id, walk, loop)
        if found is None:
            return None
        return add_gap(found, self.model, self.strategy, self.taps, prompt.tokens, loop.answer)

    def _generator(self, prompt: Prompt) -> torch.Generator:
        """Seeded by (seed, sample id), so what a prompt draws does not depend on other prompts or on the ranks."""
        return torch.Generator(self.model.device).manual_seed(int(digest([self.seed, prompt.sample_id])[:15], 16))


def current_timing_context(device: torch.device) -> TimingContext:
    """Return this device and the current time."""
    threads = torch.get_num_threads()
    cpu = f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return TimingContext(name, datetime.now(UTC).replace(microsecond=0))


@dataclass(frozen=True)
class _Part:
    """Rung 4 of one prompt; see `LoopMeasurement`."""

    acceptance: PromptAcceptance
    seconds: float
    plain_seconds: float
    tokens: int
    plain_tokens: int
    difference: Difference | None
