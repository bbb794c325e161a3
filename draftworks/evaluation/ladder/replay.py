"""Rungs 2 and 3 of the acceptance ladder: what a server would accept, replayed from stored features.

The draft proposes at every row of an answer, on its own words, in one pass. A proposal counts while it equals the answer.
Rung 2 looks at all rows alike: the accepted prefix of a block, counted jointly. Rung 3, the *walk*, visits the rows a greedy
server would: it starts at the last prompt position and jumps by what was accepted, plus the target's own token. Both
are exact only where the answer is the target's greedy one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftworks.distributed.collectives import gather_from_ranks
from draftworks.drafts.documents import Documents
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.drafts.supervision import token_mean_label_mask
from draftworks.evaluation.ladder.differences import AnswerTrace
from draftworks.evaluation.ladder.prompt_acceptance import Pass, PromptAcceptance
from draftworks.features.contracts import TrainBatch


@dataclass(frozen=True)
class ReplayResult:
    """One sample's rungs 2 and 3. What lies beyond the end of an answer is neither accepted nor emitted.

    Attributes:
        first_answer: the walk over the first of its answers, which is the one that rung 4 decodes; None where nobody asked for it.
    """

    blocks: PromptAcceptance
    walk: PromptAcceptance
    first_answer: AnswerTrace | None = None


@dataclass(frozen=True)
class AcceptedPrefixes:
    """What the answers accept of the proposals of every row t.

    Attributes:
        accepted: (B, S) int64, how many leading proposals equal the answer's tokens t+2, t+3, …; 0 outside answers.
        rejected: (B, S) int64, the proposal after these; -1 where there is none.
    """

    accepted: Tensor
    rejected: Tensor


def replay(strategy: DraftStrategy, batch: TrainBatch, count: int) -> list[ReplayResult]:
    """Every sample of a batch, proposing `count` tokens a pass."""
    prefixes, documents = find_accepted_prefixes(strategy, batch, count), Documents.of(batch)
    columns = (batch["input_ids"], get_answer_mask(batch), prefixes.accepted, prefixes.rejected)
    samples = zip(*(documents.split(column.cpu()) for column in columns))
    return [
        _of_sample(name, _Rows(*(values.numpy() for values in sample)))
        for name, sample in zip(batch.sample_ids, samples, strict=False)  # a padding batch has no names
    ]


def replay_all(
    strategy: DraftStrategy,
    batches: Iterable[TrainBatch],
    count: int,
    device: torch.device,
    trace_ids: Collection[str] = (),
) -> list[ReplayResult]:
    """Rungs 2 and 3 of every sample of all ranks, by sample id. A collective.

    Args:
        trace_ids: samples of which the walk over the first answer is wanted token by token.
    """
    mine: list[ReplayResult] = []
    for batch in batches:
        found = replay(strategy, batch.to(device), count)
        mine += [one if one.walk.sample_id in trace_ids else replace(one, first_answer=None) for one in found]
    everything = [one for share in gather_from_ranks(mine) for one in share]
    return sorted(everything, key=lambda one: one.walk.sample_id)


def get_answer_mask(batch: TrainBatch) -> Tensor:
    """(B, S) bool: the answers. A strategy whose loss leaves some of their tokens out keeps them as `answer_mask`."""
    return batch.tensors.get("answer_mask", batch["loss_mask"])


def find_accepted_prefixes(strategy: DraftStrategy, batch: TrainBatch, count: int) -> AcceptedPrefixes:
    """Proposals are asked for at the rows of answers."""
    ids, documents = batch["input_ids"], Documents.of(batch)
    label_mask = token_mean_label_mask(get_answer_mask(batch), count, documents)
    proposals = strategy.propose(batch, label_mask[0], count)
    answers = torch.stack([documents.shift_left(ids, 2 + i, fill=-1) for i in range(count)], dim=-1)
    hits = (proposals == answers) & label_mask.permute(1, 2, 0)
    accepted = hits.cumprod(-1).sum(-1)
    after = torch.nn.functional.pad(proposals, (0, 1), value=-1)
    return AcceptedPrefixes(accepted, after.gather(-1, accepted[..., None]).squeeze(-1))


@dataclass(frozen=True, eq=False)
class _Rows:
    """One sample, (S,) each."""

    ids: np.ndarray
    mask: np.ndarray
    accepted: np.ndarray
    rejected: np.ndarray

    def walk(self, begin: int, end: int) -> Iterator[Pass]:
        """The prefill gives the answer's first token; its features end one position before that."""
        row = max(begin - 1, 0)
        while row < end - 2:
            one = self.pass_at(row, end)
            yield one
            row += one.accepted + 1

    def blocks(self, begin: int, end: int) -> Iterator[Pass]:
        for row in range(max(begin - 1, 0), end - 2):
            yield self.pass_at(row, end)

    def pass_at(self, row: int, end: int) -> Pass:
        accepted, remaining, rejected = int(self.accepted[row]), end - row - 2, int(self.rejected[row])
        over = accepted == remaining or rejected < 0
        return Pass(accepted, min(accepted + 1, remaining), None if over else rejected)


def _of_sample(sample_id: str, rows: _Rows) -> ReplayResult:
    spans = list(find_answer_spans(rows.mask))
    walks = [list(rows.walk(*span)) for span in spans]
    blocks = [one for span in spans for one in rows.blocks(*span)]
    walk = [one for passes in walks for one in passes]
    first = AnswerTrace(tuple(rows.ids[slice(*spans[0])].tolist()), tuple(walks[0])) if spans else None
    return ReplayResult(PromptAcceptance.of(sample_id, blocks), PromptAcceptance.of(sample_id, walk), first)


def forward_with_replay(strategy: DraftStrategy, count: int) -> Callable[[TrainBatch, StepContext], StepOutput]:
    """The strategy's forward with the sums of both rungs among its counts, for an `Evaluator`."""

    def forward(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        output = strategy.forward_loss(batch, ctx)
        replayed = replay(strategy, batch, count)
        for rung, prompts in (("block", [r.blocks for r in replayed]), ("walk", [r.walk for r in replayed])):
            for name in ("passes", "accepted", "emitted"):
                total = sum(getattr(prompt, name) for prompt in prompts)
                output.metric_sums[f"{rung}_{name}"] = torch.tensor([total], dtype=torch.float64)
        return output

    return forward


def find_answer_spans(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """[begin, end) of every run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist())
