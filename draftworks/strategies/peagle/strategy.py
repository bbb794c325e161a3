"""P-EAGLE as a draft strategy: drawn chains, loss modes and metric sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftworks.drafts.anchors import derive_sample_seed
from draftworks.drafts.collation import BatchLayout, mask_last_positions
from draftworks.drafts.decoder_strategy import DecoderStrategy
from draftworks.drafts.documents import Documents
from draftworks.drafts.objectives import LossSettings, specforge_label_mask, token_mean_label_mask
from draftworks.drafts.option_defaults import resolve_mask_token
from draftworks.drafts.strategy import Drafter, StepContext, StepOutput
from draftworks.drafts.target_labels import TargetLabels
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.eagle3.loss import make_metric_sums
from draftworks.strategies.peagle.chains import DepthSampling, draw_chains, keep_all_chains
from draftworks.strategies.peagle.drafter import PEagleDrafter
from draftworks.strategies.peagle.model import PEagleDraft, PEagleSizes, PEagleTraits
from draftworks.strategies.peagle.options import PEAGLE, PEagleOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class PEagleStrategy(DecoderStrategy):
    """EAGLE-3's positions, each followed by a chain of masked places whose length is drawn at every step (`draw_chains`).

    The loss of a position at a depth is its cross-entropy CE with the target's distribution over the draft vocabulary, both
    at `teacher_temperature` T and times T²; if the target's argmax is outside, there is no loss, and the accuracy counts it as wrong. The modes of `options.loss`:

    `token_mean`: position a at depth d is supervised if tokens a+1 … a+2+d all are, as for EAGLE-3; chains continue from such
        positions. loss_sum = Σ CE of the drawn positions, loss_weight = their number. So the weight of a depth is the
        number of positions drawn for it, as in the reference's plain mean. (Inverse probability weights would train deep depths
        as much as shallow ones, on few and noisy positions. A server uses a depth only after all before it were accepted,
        so the falling weight is roughly that of its use.)
    `specforge`: equal to SpecForge's loss, for one sample in a micro-batch as there. Position a at depth d is supervised if the
        mask is on at a + d, the last position of every sample masked out, and at all of a + 1 … a + d;
        loss_sum = Σ CE / number of positions with a label in the draft vocabulary, loss_weight = 1; in an evaluation, the weight of
        a micro-batch is its number of supervised tokens, as in SpecForge's Evaluator.

    An evaluation draws nothing: it takes every supervised chain at full length, so its numbers depend on neither step nor
    seed. Its depths have more positions than in training, so compare losses depth by depth.

    Metric sums are by depth, as EAGLE-3's are by step; SpecForge's `full_acc` is Σ acc_corrects / Σ acc_denoms, over positions
    with a label in the draft vocabulary only. A proposal does not depend on those before it, but a table of bigrams does, so the
    comparison would not be fair: this is no `ChainStrategy`.
    """

    spec, name = PEAGLE, PEAGLE.name

    def __init__(self, options: PEagleOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = self.max_draft_tokens = options.num_depths
        self._depth_sampling = DepthSampling(options.down_sample_ratio, options.down_sample_ratio_min)
        traits = PEagleTraits(
            options.train_embeddings, options.fc_norm, options.norm_before_residual, options.sliding_window
        )
        generator = torch.Generator().manual_seed(seed)
        assert self.draft_ids is not None, "P-EAGLE predicts over a reduced vocabulary"
        self._target_labels = TargetLabels()
        self.model = PEagleDraft(self.target, self._sizes(), self.draft_ids, generator, traits, options.attention)

    def complete_batch(
        self, tensors: dict[str, Tensor], sample_ids: Sequence[str], layout: BatchLayout
    ) -> dict[str, Tensor]:
        """Add `draws`, one int64 for each sample, which its chains are drawn from."""
        tensors["draws"] = torch.tensor([derive_sample_seed(self.seed, name) for name in sample_ids])
        return mask_last_positions(tensors, layout) if self.options.loss == "specforge" else tensors

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the chains depend on the step of `ctx`."""
        documents = Documents.of(batch)
        label_mask = self._mark_labels(batch["loss_mask"], documents)
        kept = self._keep_chains(label_mask, batch, documents, ctx)
        argmaxes = None
        if ctx.training and self.reads_samples_again:
            argmaxes = self._target_labels.find(batch, label_mask, self.model.target_head)
        inputs = (batch["input_ids"], batch["features"], batch["last"])
        result = self.model(*inputs, kept, documents, LossSettings.of(self.options, ctx), argmaxes)
        supervised = kept.sum(dim=(1, 2), dtype=torch.float64)
        metric_sums = make_metric_sums(result, supervised)
        if self.options.loss == "specforge":
            labelled = result.sums["acceptance_denoms"].sum().clamp(min=1).to(result.loss.dtype)
            answers = batch["loss_mask"].sum().to(labelled.dtype)
            weight = torch.ones_like(labelled) if ctx.training else answers
            return StepOutput(result.loss * (weight / labelled), weight, metric_sums)
        return StepOutput(result.loss, supervised.sum().to(result.loss.dtype), metric_sums)

    def select_chains(self, batch: TrainBatch, ctx: StepContext) -> Tensor:
        """Return the positions of the loss at each depth, (D, B, S) bool; see the class."""
        documents = Documents.of(batch)
        return self._keep_chains(self._mark_labels(batch["loss_mask"], documents), batch, documents, ctx)

    def _mark_labels(self, loss_mask: Tensor, documents: Documents) -> Tensor:
        supervise = specforge_label_mask if self.options.loss == "specforge" else token_mean_label_mask
        return supervise(loss_mask, self.options.num_depths, documents)

    def _keep_chains(self, label_mask: Tensor, batch: TrainBatch, documents: Documents, ctx: StepContext) -> Tensor:
        if not ctx.training:
            return keep_all_chains(label_mask)
        return draw_chains(label_mask, batch["draws"], ctx.global_step, self._depth_sampling, documents)

    def drafter(self) -> Drafter:
        return PEagleDrafter(self.model, self.tap_names)

    def _sizes(self) -> PEagleSizes:
        mask = resolve_mask_token(self.name, self.options, self.target)
        return PEagleSizes(**self.resolve_layer_sizes(), num_layers=self.options.num_layers, mask_token_id=mask)

    def describe_sizes(self) -> dict[str, Any]:
        return {**self._sizes()._asdict(), "num_depths": self.options.num_depths}
