"""Rungs 2 and 3 of one draft on all ranks together, and the prompts of rung 4."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch

from draftworks.data.token_rows import TokenRow
from draftworks.distributed.collectives import gather_from_ranks
from draftworks.drafts.strategy import DraftStrategy
from draftworks.evaluation.ladder.replay import Replayed, answer_spans, replay
from draftworks.features.contracts import TrainBatch


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: the tokens before the first answer."""

    sample_id: str
    tokens: tuple[int, ...]


def replayed(
    strategy: DraftStrategy,
    batches: Iterable[TrainBatch],
    count: int,
    device: torch.device,
    courses_of: Collection[str] = (),
) -> list[Replayed]:
    """Rungs 2 and 3 of every sample of all ranks, by sample id. A collective.

    Args:
        courses_of: samples of which the walk over the first answer is wanted token by token.
    """
    mine: list[Replayed] = []
    for batch in batches:
        found = replay(strategy, batch.to(device), count)
        mine += [one if one.walk.sample_id in courses_of else replace(one, first=None) for one in found]
    everything = [one for share in gather_from_ranks(mine) for one in share]
    return sorted(everything, key=lambda one: one.walk.sample_id)


def first_prompts(tokens: Iterable[TokenRow], count: int) -> list[Prompt]:
    """Prompts of the first `count` samples by id, which is a hash: the same choice for every draft."""
    found = []
    for row in sorted(tokens, key=lambda row: row.sample_id):
        begin = next((span[0] for span in answer_spans(row.loss_mask)), 0)
        if begin > 0 and len(found) < count:
            found.append(Prompt(row.sample_id, tuple(row.input_ids[:begin].tolist())))
    return found
