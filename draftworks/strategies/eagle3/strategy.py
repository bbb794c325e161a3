"""EAGLE-3 as a draft strategy (arXiv 2503.01840): batches, loss modes, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from draftworks.drafts.collation import BatchLayout, mask_last_positions
from draftworks.drafts.decoder_strategy import DecoderStrategy
from draftworks.drafts.documents import Documents
from draftworks.drafts.objectives import (
    BatchObjective,
    Blend,
    CrossEntropy,
    LogAcceptance,
    MeanBlend,
    MeanLogAcceptance,
    Objective,
)
from draftworks.drafts.strategy import ChainStrategy, Drafter, StepContext, StepOutput
from draftworks.drafts.supervision import specforge_label_mask, token_mean_label_mask
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.eagle3.drafter import Eagle3Drafter
from draftworks.strategies.eagle3.layer import Eagle3AttentionOptions, Eagle3Sizes
from draftworks.strategies.eagle3.model import Eagle3Draft, Eagle3Norms
from draftworks.strategies.eagle3.options import EAGLE3, Eagle3Options

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class LossScaling(NamedTuple):
    """How the loss of a batch is made of the sums over rows of its steps, and what it weighs among batches.

    Attributes:
        step_weights: T factors on the sums in the loss.
        of_each_step, denoms: factor on the sums, and (T,) denominators, of the losses by step.
        loss_weight: scalar, of the batch.
    """

    step_weights: list[float]
    of_each_step: int
    denoms: Tensor
    loss_weight: Tensor


class Eagle3Strategy(DecoderStrategy, ChainStrategy):
    """One decoder layer trained on its own outputs over `ttt_length` steps.

    `options.objective` says what a row costs, with CE and α as in draftworks.drafts.objectives: `ce` CE, `lk_alpha` −log α,
    `lk_lambda` CE and 1 − α blended. A row whose target argmax is outside the draft vocabulary costs nothing, while
    accuracy counts it as wrong. The modes of `options.loss`:

    `token_mean`: rows by `token_mean_label_mask`; loss_sum = Σ_i decay^i Σ_rows cost, loss_weight = rows supervised at step 0.
        Depends on supervised tokens only, however they are batched and padded; so the blend of `lk_lambda` is each
        row's own. `loss_denoms` counts the supervised rows of each step, like `acc_denoms`.
    `specforge`: SpecForge's loss number for number. Rows by `specforge_label_mask`, the last position of every sample masked
        out; loss_sum = Σ_i decay^i L_i and loss_weight = 1. For `ce`, L_i = Σ_rows CE / (B·S), padding and prompt counted
        in B·S, which are the `loss_denoms`; for the others L_i is made of means over the batch, see `MeanLogAcceptance`
        and `MeanBlend`, and `loss_denoms` are 1 in training.

    In training `specforge` counts a micro-batch as one; an evaluation weighs it by its B·S positions, as
    SpecForge's Evaluator does, so that what an evaluation shows is its number too.

    In evaluations, or where the objective needs it, both also count the acceptance rate of each step over the supervised
    rows whose target argmax is in the draft vocabulary (`acceptance_denoms`): the sum of α. This rate is conditional, and
    higher the fewer tokens the draft has. With gradients off that over all supervised rows is counted beside it.
    """

    spec, name = EAGLE3, EAGLE3.name

    def __init__(self, options: Eagle3Options, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = options.ttt_length
        norms = Eagle3Norms(**{name: getattr(options, name) for name in Eagle3Norms._fields})
        generator = torch.Generator().manual_seed(seed)
        attention = Eagle3AttentionOptions(options.attention, options.sliding_window)
        self.model = Eagle3Draft(
            self.target, Eagle3Sizes(**self.layer_sizes()), self.draft_ids, generator, norms, attention
        )
        self._step_weights = [options.step_decay**step for step in range(options.ttt_length)]

    def complete_batch(
        self, tensors: dict[str, Tensor], sample_ids: Sequence[str], layout: BatchLayout
    ) -> dict[str, Tensor]:
        return mask_last_positions(tensors, layout) if self.options.loss == "specforge" else tensors

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """See the class for what the sums mean. The loss follows no schedule."""
        mask, documents = batch["loss_mask"], Documents.of(batch)
        label_mask = self.chain_label_mask(mask, documents)
        supervised = label_mask.sum(dim=(1, 2), dtype=torch.float64)
        shares = self._shares(supervised, mask.numel(), ctx.training)
        weights, objective = shares.step_weights, self._objective(mask.numel())
        inputs = (batch["input_ids"], batch["features"], batch["last"])
        result = self.model(*inputs, label_mask, weights, objective, documents, ctx.training)
        loss_sums = {"loss_sums": result.loss_sums * shares.of_each_step, "loss_denoms": shares.denoms}
        metric_sums = result.metric_sums(supervised) | loss_sums
        return StepOutput(result.loss, shares.loss_weight.to(result.loss.dtype), metric_sums)

    def _shares(self, supervised: Tensor, positions: int, training: bool) -> LossScaling:
        """For (T,) supervised rows by step, among so many positions of the batch."""
        if self.options.loss == "token_mean":
            return LossScaling(self._step_weights, 1, supervised, supervised[0])
        batch_weight = 1 if training else positions
        # The LK losses are means over rows already.
        divisor, each = (positions, 1) if self.options.objective == "ce" else (1, batch_weight)
        return LossScaling(
            step_weights=[weight * batch_weight / divisor for weight in self._step_weights],
            of_each_step=each,
            denoms=torch.full_like(supervised, divisor * each),
            loss_weight=torch.full_like(supervised[0], batch_weight),
        )

    def chain_label_mask(self, loss_mask: Tensor, documents: Documents) -> Tensor:
        supervise = specforge_label_mask if self.options.loss == "specforge" else token_mean_label_mask
        return supervise(loss_mask, self.options.ttt_length, documents)

    def drafter(self) -> Drafter:
        return Eagle3Drafter(self.model, self.tap_names)

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        """None: every step of the unroll calls the one layer, so sharding it by itself would gather it T times."""
        return ()

    def sizes_in_config(self) -> dict[str, Any]:
        return self.layer_sizes()

    def _objective(self, positions: int) -> Objective | BatchObjective:
        options = self.options
        if options.objective == "ce":
            return CrossEntropy()
        if options.loss == "specforge":
            if options.objective == "lk_alpha":
                return MeanLogAcceptance()
            return MeanBlend(options.kl_scale, options.kl_decay, positions)
        return LogAcceptance() if options.objective == "lk_alpha" else Blend(options.kl_scale, options.kl_decay)
