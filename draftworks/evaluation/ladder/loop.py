"""Rung 4 over many prompts, on all ranks together."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from transformers import PreTrainedModel

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
"""Raise it when what this module, `decoding` or a drafter does comes to give other counts for the same inputs."""
_REWOUND = 2
"""Of targets whose layers keep one state of all that they have read: at first it was not put back after a refusal."""


def get_loop_revision(target: TargetFiles) -> int:
    """Of what a loop with this target counts. Reads its config."""
    return _REWOUND if has_recurrent_state(target) else LOOP_REVISION


@dataclass(frozen=True)
class DecodingLoop:
    """A target, its draft, and how they decode together.

    Attributes:
        max_length: where the eval set's samples were cut, so that both rungs see the same answers; None = nowhere.
    """

    model: PreTrainedModel
    strategy: DraftStrategy
    taps: Sequence[LayerTap]
    limits: DecodingLimits
    draft_tokens: int
    seed: int
    max_length: int | None = None

    def measure(
        self, prompts: Sequence[Prompt], temperature: float, walks: Mapping[str, AnswerTrace] | None = None
    ) -> LoopMeasurement:
        """Decode every prompt with and without the draft, one after the other; ranks share the prompts. A collective.

        Args:
            walks: rung 3 of these prompts' answers, by sample id; given at temperature 0, differences are listed.
        """
        share = prompts[get_rank() :: get_world_size()]
        for prompt in share[:1]:
            self._one(prompt, temperature)  # untimed: the first prompt of a process pays for what is set up once
        mine = [self._one(prompt, temperature, None if walks is None else walks[prompt.sample_id]) for prompt in share]
        shares = gather_from_ranks(mine)
        parts = sorted((part for share in shares for part in share), key=lambda part: part.acceptance.sample_id)
        found = tuple(part.difference for part in parts if part.difference is not None)
        return LoopMeasurement(
            temperature,
            tuple(part.acceptance for part in parts),
            seconds=sum(part.seconds for part in parts),
            plain_seconds=sum(part.plain_seconds for part in parts),
            tokens=sum(part.tokens for part in parts),
            plain_tokens=sum(part.plain_tokens for part in parts),
            differences=None if walks is None else found,
            timing_context=broadcast_from_rank_0(current_timing_context(self.model.device)),
        )

    def _one(self, prompt: Prompt, temperature: float, walk: AnswerTrace | None = None) -> _Part:
        limits = self.limits
        if self.max_length is not None:
            limits = limits.within(self.max_length - len(prompt.tokens))
        plain = decode(self.model, prompt.tokens, limits, temperature, self._generator(prompt))
        spoken = speculate(
            self.model,
            self.strategy,
            self.taps,
            prompt.tokens,
            limits,
            self.draft_tokens,
            temperature,
            self._generator(prompt),
            prompt.sample_id,
        )
        difference = None if walk is None else self._difference(prompt, walk, spoken.trace)
        return _Part(
            spoken.acceptance, spoken.seconds, plain.seconds, len(spoken.tokens), len(plain.tokens), difference
        )

    def _difference(self, prompt: Prompt, walk: AnswerTrace, loop: AnswerTrace) -> Difference | None:
        found = first_difference(prompt.sample_id, walk, loop)
        if found is None:
            return None
        return add_gap(found, self.model, self.strategy, self.taps, prompt.tokens, loop.answer)

    def _generator(self, prompt: Prompt) -> torch.Generator:
        """A prompt's own, from (seed, sample id): what one prompt draws does not depend on the others, or on the ranks."""
        return torch.Generator(self.model.device).manual_seed(int(digest([self.seed, prompt.sample_id])[:15], 16))


def current_timing_context(device: torch.device) -> TimingContext:
    """Here and now."""
    threads = torch.get_num_threads()
    cpu = f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return TimingContext(name, datetime.now(UTC).replace(microsecond=0))


@dataclass(frozen=True)
class _Part:
    acceptance: PromptAcceptance
    seconds: float
    plain_seconds: float
    tokens: int
    plain_tokens: int
    difference: Difference | None
