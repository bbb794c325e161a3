"""One evaluation pass: run a draft's forward over batches, add everything up, divide once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from draftworks.distributed.collectives import max_over_ranks, world_size
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.errors import DataError
from draftworks.evaluation.result import EvalResult, Tally, agreed_layout
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
            stop_signal: number of the signal that asks this rank to stop, or 0. The ranks agree after every batch, so they
                need equal numbers of them.

        Raises:
            DataError: the loss is not finite.
            EvaluationStopped: a rank was asked to stop.
        """
        forward = draft.forward_loss if isinstance(draft, DraftStrategy) else draft
        where = ctx or StepContext()
        tally = Tally()
        with torch.no_grad():
            for batch in batches:
                output = forward(batch.to(self._device), where)
                if batch.sample_ids:  # else it is padding, run only so that every rank's forwards match
                    tally.add(output, batch.num_tokens)
                if stop_signal is not None and (signum := max_over_ranks(stop_signal())):
                    raise EvaluationStopped(signum)
        result = tally.over_ranks(agreed_layout(tally) if world_size() > 1 else None)
        if not math.isfinite(result.loss_sum):
            raise DataError(
                f"the loss over {result.supervised_tokens} evaluated tokens is {result.loss_sum}: "
                "look at the eval set's features and at the draft's weights for values that are not finite"
            )
        return result if result.supervised_tokens else None
