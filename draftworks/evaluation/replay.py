"""Rungs 2 and 3 of the acceptance ladder: what a server would accept, replayed from stored features.

The draft proposes at every row of an answer, on its own words, in one pass. A proposal counts while it equals the answer.
Rung 2 looks at all rows alike: the accepted prefix of a block, counted jointly. Rung 3, the *walk*, visits the rows a greedy
server would: it starts at the last prompt position and jumps by what was accepted, plus the target's own token. Both
are exact only where the answer is the target's greedy one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.drafts.supervision import token_mean_gates
from draftworks.evaluation.prompt_acceptance import PromptAcceptance
from draftworks.features.contracts import TrainBatch


@dataclass(frozen=True)
class Replayed:
    """One sample's rungs 2 and 3. What lies beyond the end of an answer is neither accepted nor emitted."""

    blocks: PromptAcceptance
    walk: PromptAcceptance


@dataclass(frozen=True)
class Pass:
    """What one pass of the target over a proposal gave: draft tokens accepted, tokens emitted."""

    accepted: int
    emitted: int


def replay(strategy: DraftStrategy, batch: TrainBatch, count: int) -> list[Replayed]:
    """Every sample of a batch, proposing `count` tokens a pass."""
    accepted = accepted_prefixes(strategy, batch, count).cpu().numpy()
    masks = batch["loss_mask"].cpu().numpy()
    return [
        replay_sample(name, row, mask)
        for name, row, mask in zip(batch.sample_ids, accepted, masks, strict=False)  # a padding batch has no names
    ]


def accepted_prefixes(strategy: DraftStrategy, batch: TrainBatch, count: int) -> Tensor:
    """(B, S) int64: how many leading proposals of row t equal the answer's tokens t+2, t+3, …; 0 outside answers."""
    ids = batch["input_ids"]
    gates = token_mean_gates(batch["loss_mask"], count)
    proposals = strategy.propose(batch, gates[0], count)
    ahead = torch.nn.functional.pad(ids, (0, count + 1), value=-1)
    length = ids.shape[1]
    answers = torch.stack([ahead[:, 2 + i : 2 + i + length] for i in range(count)], dim=-1)
    hits = (proposals == answers) & gates.permute(1, 2, 0)
    return hits.cumprod(-1).sum(-1)


def replay_sample(sample_id: str, accepted: np.ndarray, mask: np.ndarray) -> Replayed:
    """From the accepted prefix at every row (S,) and the answer's mask (S,)."""
    blocks = [one for span in answer_spans(mask) for one in _blocks(accepted, *span)]
    walk = [one for span in answer_spans(mask) for one in _walk(accepted, *span)]
    return Replayed(_counted(sample_id, blocks), _counted(sample_id, walk))


def with_replay(strategy: DraftStrategy, count: int) -> Callable[[TrainBatch, StepContext], StepOutput]:
    """The strategy's forward with the sums of both rungs among its counts, for an `Evaluator`."""

    def forward(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        output = strategy.forward_loss(batch, ctx)
        replayed = replay(strategy, batch, count)
        for rung, prompts in (("block", [r.blocks for r in replayed]), ("walk", [r.walk for r in replayed])):
            for name in ("passes", "accepted", "emitted"):
                total = sum(getattr(prompt, name) for prompt in prompts)
                output.counts[f"{rung}_{name}"] = torch.tensor([total], dtype=torch.float64)
        return output

    return forward


def answer_spans(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """[begin, end) of every run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist())


def _blocks(accepted: np.ndarray, begin: int, end: int) -> Iterator[Pass]:
    for row in range(max(begin - 1, 0), end - 2):
        yield _pass(int(accepted[row]), end - row - 2)


def _walk(accepted: np.ndarray, begin: int, end: int) -> Iterator[Pass]:
    """The prefill gives the answer's first token; its features end one position before that."""
    row = max(begin - 1, 0)
    while row < end - 2:
        one = _pass(int(accepted[row]), end - row - 2)
        yield one
        row += one.accepted + 1


def _pass(accepted: int, remaining: int) -> Pass:
    return Pass(accepted, min(accepted + 1, remaining))


def _counted(sample_id: str, passes: Sequence[Pass]) -> PromptAcceptance:
    accepted = [one.accepted for one in passes]
    return PromptAcceptance.of_passes(sample_id, accepted, sum(one.emitted for one in passes))
