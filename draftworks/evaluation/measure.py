"""Measuring one draft on the rungs of the ladder, on all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftworks.data.tokenized import TokenizedSet
from draftworks.drafts.strategy import DraftStrategy
from draftworks.evaluation.baselines import argmax_of_head
from draftworks.evaluation.collectives import gather_from_ranks, rank, sum_over_ranks, world_size
from draftworks.evaluation.decoding import DecodingLimits, decode, speculate
from draftworks.evaluation.measurement import LoopMeasurement
from draftworks.evaluation.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.replay import Replayed, answer_spans, replay
from draftworks.features.contracts import TrainBatch
from draftworks.identity import LayerTap, digest


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: the tokens before the first answer."""

    sample_id: str
    tokens: tuple[int, ...]


def replayed(
    strategy: DraftStrategy, batches: Iterable[TrainBatch], count: int, device: torch.device
) -> list[Replayed]:
    """Rungs 2 and 3 of every sample of all ranks, by sample id. A collective."""
    mine: list[Replayed] = []
    for batch in batches:
        mine += replay(strategy, batch.to(device), count)
    everything = [one for share in gather_from_ranks(mine) for one in share]
    return sorted(everything, key=lambda one: one.walk.sample_id)


def label_agreement(batches: Iterable[TrainBatch], head: Tensor, device: torch.device) -> float:
    """Share of answer tokens that are the target's own argmax where it said them. A collective.

    The replay is exact serving only where it is 1: the answers must be the target's greedy ones.

    Args:
        head: (V, H), the target's, on `device`.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        if not batch.sample_ids:
            continue
        ids, mask = batch["input_ids"][:, 1:], batch["loss_mask"][:, 1:]
        said = argmax_of_head(head, batch["last"][:, :-1][mask].to(device)).cpu()
        counts += torch.tensor([(said == ids[mask]).sum(), len(said)], dtype=torch.float64)
    agreed, total = sum_over_ranks(counts).tolist()
    return agreed / total if total else 0.0


def first_prompts(tokens: TokenizedSet, count: int) -> list[Prompt]:
    """Prompts of the first `count` samples by id, which is a hash: the same choice for every draft."""
    found = []
    for row in sorted(tokens, key=lambda row: row.sample_id):
        begin = next((span[0] for span in answer_spans(row.loss_mask)), 0)
        if begin > 0 and len(found) < count:
            found.append(Prompt(row.sample_id, tuple(row.input_ids[:begin].tolist())))
    return found


@dataclass(frozen=True)
class Loop:
    """Rung 4: a target, its draft, and how they decode together.

    Attributes:
        max_length: where the eval set's samples were cut, so that both rungs see the same answers; None = nowhere.
    """

    model: PreTrainedModel
    strategy: DraftStrategy
    taps: Sequence[LayerTap]
    limits: DecodingLimits
    count: int
    seed: int
    max_length: int | None = None

    def measure(self, prompts: Sequence[Prompt], temperature: float) -> LoopMeasurement:
        """Decode every prompt with and without the draft, one after the other; ranks share the prompts. A collective."""
        share = prompts[rank() :: world_size()]
        for prompt in share[:1]:
            self._one(prompt, temperature)  # untimed: the first prompt of a process pays for what is set up once
        mine = [self._one(prompt, temperature) for prompt in share]
        shares = gather_from_ranks(mine)
        parts = sorted((part for share in shares for part in share), key=lambda part: part.acceptance.sample_id)
        return LoopMeasurement(
            temperature,
            tuple(part.acceptance for part in parts),
            seconds=sum(part.seconds for part in parts),
            plain_seconds=sum(part.plain_seconds for part in parts),
            tokens=sum(part.tokens for part in parts),
            plain_tokens=sum(part.plain_tokens for part in parts),
        )

    def _one(self, prompt: Prompt, temperature: float) -> _Part:
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
            self.count,
            temperature,
            self._generator(prompt),
            prompt.sample_id,
        )
        return _Part(spoken.acceptance, spoken.seconds, plain.seconds, len(spoken.tokens), len(plain.tokens))

    def _generator(self, prompt: Prompt) -> torch.Generator:
        """A prompt's own, from (seed, sample id): what one prompt draws does not depend on the others, or on the ranks."""
        return torch.Generator(self.model.device).manual_seed(int(digest([self.seed, prompt.sample_id])[:15], 16))


@dataclass(frozen=True)
class _Part:
    acceptance: PromptAcceptance
    seconds: float
    plain_seconds: float
    tokens: int
    plain_tokens: int
