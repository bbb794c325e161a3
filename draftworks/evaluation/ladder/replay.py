"""Rungs 2 and 3 of the acceptance ladder: what a server would accept, replayed from stored features.

The draft proposes at every position of an answer in one pass, on its own tokens. A proposed token counts while the
proposal equals the answer. Rung 2 takes all positions: the accepted prefix of a proposal, counted jointly. Rung 3, the
*walk*, takes the positions that a greedy server would: it starts at the last prompt position and advances by the
accepted tokens plus the target's own. Both are exact only if the answer is the target's greedy one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from draftworks.distributed.collectives import gather_from_ranks
from draftworks.drafts.documents import Documents
from draftworks.drafts.objectives import token_mean_label_mask
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.evaluation.ladder.answer_walk import AnswerSpan, find_answer_spans
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace, Pass, PromptAcceptance, split_by_position
from draftworks.features.contracts import TrainBatch


@dataclass(frozen=True)
class ReplayResult:
    """Rungs 2 and 3 of one sample. Tokens after the end of an answer are neither accepted nor emitted.

    Attributes:
        walk_by_position: the walk in each range of places that it has a pass in, by the begin of the range.
        first_answer: trace of the walk over the first answer, which rung 4 decodes; None if it was not asked for.
    """

    blocks: PromptAcceptance
    walk: PromptAcceptance
    walk_by_position: Mapping[int, PromptAcceptance]
    first_answer: AnswerTrace | None = None


@dataclass(frozen=True)
class AcceptedPrefixes:
    """Acceptance of the proposals at every position t.

    Attributes:
        accepted: (B, S) int64, how many leading tokens of the proposal equal the answer's tokens t+2, t+3, …; 0 outside
            answers.
        rejected: (B, S) int64, the proposed token after these; -1 without one.
    """

    accepted: Tensor
    rejected: Tensor


def replay(strategy: DraftStrategy, batch: TrainBatch, draft_tokens: int) -> list[ReplayResult]:
    """Replay every sample of a batch, with `draft_tokens` tokens proposed per pass."""
    prefixes, documents = find_accepted_prefixes(strategy, batch, draft_tokens), Documents.of(batch)
    columns = (batch["input_ids"], get_answer_mask(batch), prefixes.accepted, prefixes.rejected)  # (B, S) each
    samples = zip(*(documents.split(column.cpu()) for column in columns))
    return [
        _replay_sample(sample_id, _Sample(*(values.numpy() for values in sample)))
        for sample_id, sample in zip(batch.sample_ids, samples, strict=False)  # a padding batch has no sample ids
    ]


def replay_all(
    strategy: DraftStrategy,
    batches: Iterable[TrainBatch],
    draft_tokens: int,
    device: torch.device,
    trace_ids: Collection[str] = (),
) -> list[ReplayResult]:
    """Return rungs 2 and 3 of the samples of all ranks, ordered by sample id. A collective.

    Args:
        trace_ids: samples whose `first_answer` is kept.
    """
    local: list[ReplayResult] = []
    for batch in batches:
        results = replay(strategy, batch.to(device), draft_tokens)
        local += [one if one.walk.sample_id in trace_ids else replace(one, first_answer=None) for one in results]
    everything = [one for results in gather_from_ranks(local) for one in results]
    return sorted(everything, key=lambda one: one.walk.sample_id)


def get_answer_mask(batch: TrainBatch) -> Tensor:
    """Return the mask of answer tokens, (B, S) bool.

    A strategy whose loss leaves some of them out stores the whole mask as `answer_mask`.
    """
    return batch.tensors.get("answer_mask", batch["loss_mask"])


def find_accepted_prefixes(strategy: DraftStrategy, batch: TrainBatch, draft_tokens: int) -> AcceptedPrefixes:
    """Compare the proposals at the positions of answers with the answers."""
    ids, documents = batch["input_ids"], Documents.of(batch)
    label_mask = token_mean_label_mask(get_answer_mask(batch), draft_tokens, documents)  # (T, B, S)
    proposals = strategy.propose(batch, label_mask[0], draft_tokens)  # (B, S, T)
    answers = torch.stack([documents.shift_left(ids, 2 + i, fill=-1) for i in range(draft_tokens)], dim=-1)
    hits = (proposals == answers) & label_mask.permute(1, 2, 0)  # (B, S, T)
    accepted = hits.cumprod(-1).sum(-1)  # (B, S)
    padded = torch.nn.functional.pad(proposals, (0, 1), value=-1)  # (B, S, T + 1)
    return AcceptedPrefixes(accepted, padded.gather(-1, accepted[..., None]).squeeze(-1))


@dataclass(frozen=True, eq=False)
class _Sample:
    """One sample, (S,) each."""

    ids: np.ndarray
    mask: np.ndarray
    accepted: np.ndarray
    rejected: np.ndarray

    def ask(self, span: AnswerSpan, known: int) -> Pass:
        """Return the pass at which the first `known` tokens are known: the draft was asked two positions before."""
        rejected = int(self.rejected[known - 2])
        return span.make_pass(known, int(self.accepted[known - 2]), None if rejected < 0 else rejected)


def _replay_sample(sample_id: str, sample: _Sample) -> ReplayResult:
    spans = list(find_answer_spans(sample.mask))
    walks = [list(span.walk(partial(sample.ask, span))) for span in spans]
    blocks = [one for span in spans for one in span.walk_everywhere(partial(sample.ask, span))]
    placed = [one for passes in walks for one in passes]
    first = None
    if spans:
        first = AnswerTrace(tuple(sample.ids[slice(*spans[0])].tolist()), tuple(one.result for one in walks[0]))
    return ReplayResult(
        PromptAcceptance.of(sample_id, blocks),
        PromptAcceptance.of(sample_id, [one.result for one in placed]),
        split_by_position(sample_id, placed),
        first,
    )


def forward_with_replay(strategy: DraftStrategy, draft_tokens: int) -> Callable[[TrainBatch, StepContext], StepOutput]:
    """Return the strategy's forward with the metric sums of rungs 2 and 3 added, for an `Evaluator`."""

    def forward(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        output = strategy.forward_loss(batch, ctx)
        results = replay(strategy, batch, draft_tokens)
        for rung, prompts in (("block", [one.blocks for one in results]), ("walk", [one.walk for one in results])):
            for name in ("passes", "accepted", "emitted"):
                total = sum(getattr(prompt, name) for prompt in prompts)
                output.metric_sums[f"{rung}_{name}"] = torch.tensor([total], dtype=torch.float64)
        return output

    return forward
