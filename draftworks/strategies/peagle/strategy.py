"""P-EAGLE as a draft strategy: batches, the draw of chains, loss modes, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftworks.drafts.anchors import derive_sample_seed
from draftworks.drafts.collation import BatchLayout, collate_with_last, mask_last_positions, sample_lengths
from draftworks.drafts.documents import Documents
from draftworks.drafts.layers import require_draft_ids
from draftworks.drafts.option_defaults import resolve_head_counts, resolve_mask_token
from draftworks.drafts.strategy import Drafter, DraftStrategy, StepContext, StepOutput
from draftworks.drafts.supervision import specforge_label_mask, token_mean_label_mask
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.peagle.chains import DepthSampling, draw_chains, keep_all_chains
from draftworks.strategies.peagle.drafter import PEagleDrafter
from draftworks.strategies.peagle.model import PEagleDraft, PEagleSizes, PEagleTraits
from draftworks.strategies.peagle.options import PEAGLE, PEagleOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class PEagleStrategy(DraftStrategy):
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

    name = PEAGLE.name
    model_methods = ("propose",)

    def __init__(self, options: PEagleOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        draft_ids = require_draft_ids(self.name, vocab, options.draft_vocab_size, target)
        self.options = options
        self.draft_tokens = self.max_draft_tokens = options.num_depths
        self.feature_names = PEAGLE.list_features(target.num_layers, options)
        self._target = target = target.with_layer_options(options)
        self._seed = seed
        self._sizes = _sizes(options, target, taps=len(self.feature_names) - 1)
        self._thinning = DepthSampling(options.down_sample_ratio, options.down_sample_ratio_min)
        traits = PEagleTraits(options.train_embeddings, options.fc_norm, options.norm_before_residual)
        generator = torch.Generator().manual_seed(seed)
        self.model = PEagleDraft(target, self._sizes, draft_ids, generator, traits, options.attention)

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Right-pad; taps side by side in `features` (B, S, taps · H), `last` (B, S, H). `draws` (B,) is where chains come from."""
        return self._laid_out(samples, sample_ids, BatchLayout.padded(sample_lengths(samples)))

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """The same in one row without padding, B = 1; `draws` are still one for each sample."""
        return self._laid_out(samples, sample_ids, BatchLayout.packed(sample_lengths(samples)))

    def _laid_out(
        self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str], layout: BatchLayout
    ) -> TrainBatch:
        batch = collate_with_last(samples, sample_ids, self.feature_names, self._target.hidden_size, layout)
        batch["draws"] = torch.tensor([derive_sample_seed(self._seed, name) for name in sample_ids])
        if self.options.loss == "specforge":
            batch = mask_last_positions(batch, layout)
        return TrainBatch(batch, tuple(sample_ids), sum(sample_lengths(samples)), layout.documents)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """See the class for what the sums mean. The step of `ctx` decides the chains of a training."""
        kept = self.chains(batch, ctx)
        result = self.model(
            batch["input_ids"], batch["features"], batch["last"], kept, Documents.of(batch), ctx.training
        )
        supervised = kept.sum(dim=(1, 2), dtype=torch.float64)
        metric_sums = {
            "acc_corrects": result.corrects,
            "acc_denoms": supervised,
            "loss_sums": result.loss_sums,
            "loss_denoms": supervised,
        }
        if result.accepted is not None:
            metric_sums |= {"acceptance_sums": result.accepted, "acceptance_denoms": result.taught}
        if result.accepted_all is not None:
            metric_sums |= {
                "unconditional_acceptance_sums": result.accepted_all,
                "unconditional_acceptance_denoms": supervised,
            }
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
        return draw_chains(label_mask, batch["draws"], ctx.global_step, self._thinning, documents)

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        if count > self.draft_tokens:
            raise ConfigError(
                f"peagle: a draft of num_depths {self.draft_tokens} proposes so many tokens, asked for {count}: "
                f"set evaluation.draft_tokens to at most {self.draft_tokens}"
            )
        return self.model.propose(batch["input_ids"], batch["features"], position_mask, count, Documents.of(batch))

    def drafter(self) -> Drafter:
        return PEagleDrafter(self.model, self.feature_names[:-1])

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return tuple(self.model.layers)

    def config(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "options": self.options.identity(),
            "feature_names": list(self.feature_names),
            "hidden_size": self._target.hidden_size,
            "head_dim": self._target.head_dim,
            **self._sizes._asdict(),
            "num_depths": self.options.num_depths,
            "rms_norm_eps": self._target.rms_norm_eps,
            "rope_parameters": dict(self._target.rope),
            "max_position_embeddings": self._target.max_positions,
            "vocab_size": self._target.vocab_size,
            "draft_vocab_size": self.model.d2t.numel(),
        }


def _sizes(options: PEagleOptions, target: TargetParts, taps: int) -> PEagleSizes:
    return PEagleSizes(
        **resolve_head_counts("peagle", options, target)._asdict(),
        intermediate_size=options.intermediate_size or target.intermediate_size,
        taps=taps,
        num_layers=options.num_layers,
        mask_token_id=resolve_mask_token("peagle", options, target),
    )
