"""One evaluation pass: run a draft's forward over batches, add everything up, divide once."""

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
from draftworks.evaluation.result import EvalResult, MetricAccumulator, agree_on_layout
from draftworks.features.contracts import TrainBatch


class EvaluationStopped(Exception):
    """A signal came while an evaluation was under way; raised on all ranks together."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum


Forward = Callable[[TrainBatch, StepContext], StepOutput]


class Evaluator:
    """Measures drafts, and baselines that count as drafts do.

    Every rank issues the same collectives whatever its share of the batches, an empty one included: one to agree on
    what was counted, one to add it up. A model that communicates in its forward (FSDP) needs equal numbers of
    batches, which `FeatureDataLoader.for_evaluation` gives by padding batches.

    Args:
        device: where batches are moved to before the forward.
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
        """The result over all batches of all ranks; None where no rank had a supervised token. A collective.

        An evaluation of nothing is no result: a made-up zero would look like a bad draft.

        Args:
            ctx: where training stands; it is evaluated whatever mode this says.
            stop_signal: number of the signal that asks this rank to stop, or 0. The ranks agree after every batch, so they
                need equal numbers of them.

        Raises:
            DataError: the loss is not finite.
            EvaluationStopped: a rank was asked to stop.
        """
        forward = draft.forward_loss if isinstance(draft, DraftStrategy) else draft
        where = replace(ctx or StepContext(training=False), training=False)
        tally = MetricAccumulator()
        with torch.no_grad():
            for batch in batches:
                output = forward(batch.to(self._device), where)
                if batch.sample_ids:  # else it is padding, run only so that every rank's forwards match
                    tally.add(output, batch.num_tokens)
                if stop_signal is not None and (signum := max_over_ranks(stop_signal())):
                    raise EvaluationStopped(signum)
        result = tally.sum_over_ranks(agree_on_layout(tally) if get_world_size() > 1 else None)
        if not math.isfinite(result.loss_sum):
            raise DataError(
                f"the loss over {result.supervised_tokens} evaluated tokens is {result.loss_sum}: "
                "look at the eval set's features and at the draft's weights for values that are not finite"
            )
        return result if result.supervised_tokens else None


def collate_labels(samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
    """The answers' tokens, one after the other, and the hidden states that foretell them: for any strategy alike.

    Args:
        samples: `input_ids` (S,) int64, `loss_mask` (S,) bool, `last` (S, H), after the target's final norm.

    Returns:
        `labels` (N,) and `last` (N, H), of N answer tokens.
    """
    answers = [sample["loss_mask"][1:].bool() for sample in samples]
    labels = [sample["input_ids"][1:][mask] for sample, mask in zip(samples, answers)]
    last = [sample["last"][:-1][mask] for sample, mask in zip(samples, answers)]
    tensors = {"labels": torch.cat(labels), "last": torch.cat(last)}
    return TrainBatch(tensors, tuple(sample_ids), sum(len(sample["input_ids"]) for sample in samples))


def measure_label_agreement(batches: Iterable[TrainBatch], head: Tensor, device: torch.device) -> float:
    """Share of answer tokens that are the target's own argmax where it said them. A collective.

    The replay is exact serving only where it is 1: the answers must be the target's greedy ones.

    Args:
        batches: as `collate_labels` makes them.
        head: (V, H), the target's, on `device`.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        said = argmax_of_head(head, batch["last"].to(device)).cpu()
        counts += torch.tensor([(said == batch["labels"]).sum(), len(said)], dtype=torch.float64)
    agreed, total = sum_over_ranks(counts).tolist()
    return agreed / total if total else 0.0
