"""Evaluation pass: run a draft's forward over all batches, add up the metric sums, divide once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftworks.distributed.collectives import get_world_size, max_over_ranks, sum_over_ranks
from draftworks.drafts.layers import argmax_of_head
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.errors import DataError
from draftworks.evaluation.labels import NEAR_TIE, LabelCounts
from draftworks.evaluation.result import EvalResult, MetricAccumulator, agree_on_layout
from draftworks.features.contracts import TrainBatch


class EvaluationStopped(Exception):
    """A stop signal arrived during an evaluation; raised on all ranks after the same batch."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum


Forward = Callable[[TrainBatch, StepContext], StepOutput]


class Evaluator:
    """Evaluates drafts, and baselines that return the same metric sums.

    Every rank runs the same two collectives, even without a batch: one to agree on the names and lengths of the sums,
    one to add them. A model that communicates in its forward (FSDP) needs the same number of batches on every rank;
    `FeatureDataLoader.for_evaluation` adds padding batches for that.

    Args:
        device: the device that batches are moved to before the forward.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def run(
        self,
        draft: DraftStrategy | Forward,
        batches: Iterable[TrainBatch],
        ctx: StepContext | None = None,
        stop_signal: Callable[[], int] | None = None,
    ) -> EvalResult | None:
        """Return the result over all batches of all ranks, or None without a supervised token. A collective.

        Without a supervised token a result of zeros would look like a bad draft.

        Args:
            ctx: progress of the training; its `training` flag is ignored, the forward always evaluates.
            stop_signal: returns the number of the signal that asks this rank to stop, or 0. The ranks compare it after
                every batch, so each needs the same number of batches.

        Raises:
            DataError: the loss is not finite.
            EvaluationStopped: a rank was asked to stop.
        """
        forward = draft.forward_loss if isinstance(draft, DraftStrategy) else draft
        eval_ctx = replace(ctx or StepContext(training=False), training=False)
        accumulator = MetricAccumulator()
        with torch.no_grad():
            for batch in batches:
                output = forward(batch.to(self._device), eval_ctx)
                if batch.sample_ids:  # else a padding batch, run only to keep the ranks' forwards in step
                    accumulator.add(output, batch.num_tokens)
                if stop_signal is not None and (signum := max_over_ranks(stop_signal())):
                    raise EvaluationStopped(signum)
        result = accumulator.sum_over_ranks(agree_on_layout(accumulator) if get_world_size() > 1 else None)
        if not math.isfinite(result.loss_sum):
            raise DataError(
                f"the loss over {result.supervised_tokens} evaluated tokens is {result.loss_sum}: "
                "look for values that are not finite in the eval set's features and in the draft's weights"
            )
        return result if result.supervised_tokens else None


def collate_labels(samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
    """Collate all answer tokens and the hidden states that predict them; the same for every strategy.

    Args:
        samples: `input_ids` (S,) int64, `loss_mask` (S,) bool, `last` (S, H), after the target's final norm.

    Returns:
        `labels` (N,) and `last` (N, H) of the N answer tokens of all samples.
    """
    masks = [sample["loss_mask"][1:].bool() for sample in samples]  # (S - 1,) each
    labels = [sample["input_ids"][1:][mask] for sample, mask in zip(samples, masks)]
    last = [
        sample["last"][:-1][mask] for sample, mask in zip(samples, masks)
    ]  # the state before each label predicts it
    tensors = {"labels": torch.cat(labels), "last": torch.cat(last)}
    return TrainBatch(tensors, tuple(sample_ids), sum(len(sample["input_ids"]) for sample in samples))


def count_labels(batches: Iterable[TrainBatch], head: Tensor, device: torch.device) -> LabelCounts:
    """Count the answer tokens that are not the target's argmax at their position, and those that nearly are. A collective.

    Rungs 2 and 3 equal greedy serving only if all are, because they assume that answers are the target's greedy ones.

    Args:
        batches: from `collate_labels`.
        head: (V, H), the target's head, on `device`.
    """
    counts = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        last, labels = batch["last"].to(device), batch["labels"].to(device)
        greedy = argmax_of_head(head, last)  # (N,)
        differ = greedy != labels
        near = _count_near_ties(head, last[differ], greedy[differ], labels[differ])
        counts += torch.tensor([len(labels), int(differ.sum()), near], dtype=torch.float64)
    return LabelCounts(*(int(count) for count in sum_over_ranks(counts).tolist()))


def _count_near_ties(head: Tensor, last: Tensor, greedy: Tensor, labels: Tensor) -> int:
    """Return at how many positions the label's logit is as near to the best one as `NEAR_TIE` says.

    Args:
        last: (N, H); greedy, labels: (N,) ids.
    """
    states = last.float()
    best, label = ((states * head[ids].float()).sum(-1) for ids in (greedy, labels))
    return int((best - label <= NEAR_TIE * torch.maximum(best.abs(), label.abs())).sum())
