"""P-EAGLE as a draft strategy: batches, the draw of chains, loss modes, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftworks.drafts.anchors import derive_sample_seed
from draftworks.drafts.collation import BatchLayout, mask_last_positions
from draftworks.drafts.decoder_strategy import DecoderStrategy
from draftworks.drafts.documents import Documents
from draftworks.drafts.option_defaults import resolve_mask_token
from draftworks.drafts.strategy import Drafter, StepContext, StepOutput
from draftworks.drafts.supervision import specforge_label_mask, token_mean_label_mask
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.peagle.chains import DepthSampling, draw_chains, keep_all_chains
from draftworks.strategies.peagle.drafter import PEagleDrafter
from draftworks.strategies.peagle.model import PEagleDraft, PEagleSizes, PEagleTraits
from draftworks.strategies.peagle.options import PEAGLE, PEagleOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class PEagleStrategy(DecoderStrategy):
    """EAGLE-3's rows, each followed by a chain of masks whose length is drawn anew at every step (see `draw_chains`).

    A row costs its cross-entropy CE with the target's distribution over the draft vocabulary; one whose target argmax is
    outside costs nothing, while accuracy counts it as wrong. The modes of `options.loss`:

    `token_mean`: row a at depth d counts if tokens a+1 … a+2+d are all supervised, as for EAGLE-3; chains go on from such rows.
        loss_sum = Σ CE of the rows drawn, loss_weight = how many they are. So a depth weighs as much as it has rows: the
        fewer are drawn the less, which is the reference's plain mean. (Weighing each row by how unlikely it was to
        be drawn would teach deep depths as much as shallow ones, by few and noisy rows. Servers ask a depth for
        something only after all before it have been accepted, so the falling weight is roughly that of its use.)
    `specforge`: SpecForge's loss number for number, for one sample in a micro-batch as there. Row a at depth d counts if the mask
        is on at a + d, the last position of every sample masked out, and at all of a + 1 … a + d;
        loss_sum = Σ CE / number of rows with a label in the draft vocabulary, loss_weight = 1; in an evaluation a micro-batch
        weighs its supervised tokens, as in SpecForge's Evaluator.

    An evaluation draws nothing: it takes every chain that counts, to its full length, so its numbers depend on neither step nor
    seed. Its depths have more rows than those of a training, so compare losses depth by depth.

    Counts are by depth, as EAGLE-3's are by step; SpecForge's `full_acc` is Σ acc_corrects / Σ acc_denoms, over rows with a label
    in the draft vocabulary only. No proposal knows the ones before it, so a table of bigrams, which does,
    would not be a fair comparison: this is no `ChainStrategy`.
    """

    spec, name = PEAGLE, PEAGLE.name

    def __init__(self, options: PEagleOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = self.max_draft_tokens = options.num_depths
        self._depth_sampling = DepthSampling(options.down_sample_ratio, options.down_sample_ratio_min)
        traits = PEagleTraits(options.train_embeddings, options.fc_norm, options.norm_before_residual)
        generator = torch.Generator().manual_seed(seed)
        self.model = PEagleDraft(self.target, self._sizes(), self.draft_ids, generator, traits, options.attention)

    def complete_batch(
        self, tensors: dict[str, Tensor], sample_ids: Sequence[str], layout: BatchLayout
    ) -> dict[str, Tensor]:
        """Add `draws`, one int64 for each sample, which its chains are drawn from."""
        tensors["draws"] = torch.tensor([derive_sample_seed(self.seed, name) for name in sample_ids])
        return mask_last_positions(tensors, layout) if self.options.loss == "specforge" else tensors

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """See the class for what the sums mean. The step of `ctx` decides the chains of a training."""
        kept = self.chains(batch, ctx)
        result = self.model(
            batch["input_ids"], batch["features"], batch["last"], kept, Documents.of(batch), ctx.training
        )
        supervised = kept.sum(dim=(1, 2), dtype=torch.float64)
        metric_sums = result.metric_sums(supervised)
        if self.options.loss == "specforge":
            labelled = result.taught.sum().clamp(min=1).to(result.loss.dtype)
            answers = batch["loss_mask"].sum().to(labelled.dtype)
            weight = torch.ones_like(labelled) if ctx.training else answers
            return StepOutput(result.loss * (weight / labelled), weight, metric_sums)
        return StepOutput(result.loss, supervised.sum().to(result.loss.dtype), metric_sums)

    def chains(self, batch: TrainBatch, ctx: StepContext) -> Tensor:
        """Which rows the loss looks at, (D, B, S) bool; see the class."""
        documents = Documents.of(batch)
        supervise = specforge_label_mask if self.options.loss == "specforge" else token_mean_label_mask
        label_mask = supervise(batch["loss_mask"], self.options.num_depths, documents)
        if not ctx.training:
            return keep_all_chains(label_mask)
        return draw_chains(label_mask, batch["draws"], ctx.global_step, self._depth_sampling, documents)

    def drafter(self) -> Drafter:
        return PEagleDrafter(self.model, self.tap_names)

    def _sizes(self) -> PEagleSizes:
        mask = resolve_mask_token(self.name, self.options, self.target)
        return PEagleSizes(**self.layer_sizes(), num_layers=self.options.num_layers, mask_token_id=mask)

    def sizes_in_config(self) -> dict[str, Any]:
        return {**self._sizes()._asdict(), "num_depths": self.options.num_depths}
