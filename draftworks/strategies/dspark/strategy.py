"""DSpark as a draft strategy: DFlash's batches and anchors, a loss towards the target's distributions, metric sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftworks.drafts.acceptance import name_served_sums
from draftworks.drafts.anchors import derive_sample_seed, gather_labels, make_label_mask
from draftworks.drafts.objectives import Temperatures
from draftworks.drafts.strategy import Drafter, StepContext, StepOutput
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash.block_drafter import BlockDrafter
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dspark.loss import DSparkLosses, DSparkObjective
from draftworks.strategies.dspark.model import DSparkDraft, DSparkSizes
from draftworks.strategies.dspark.options import DSPARK, DSparkOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class DSparkStrategy(DFlashStrategy):
    """Blocks at DFlash's anchors; each label is predicted from the true token before it.

    The loss of a label is in draftworks.strategies.dspark.loss. Its weight w is DFlash's: by place (`gamma`), or D-PACE, which takes
    its confidences from the cross-entropies of the corrected logits. (speculators leaves its confidence head out of D-PACE;
    here w weights the whole loss of a label, as in SpecForge's formula.)

    In both modes of `options.loss` the labels of a block are those up to the end of the anchor's answer, as in SpecForge's
    DSpark; loss_weight = Σ of the weights by place. So `specforge` differs only with D-PACE, for which no publication gives a
    normaliser for DSpark: it takes DFlash's, the number of samples.

    Beside `acc_*`, `loss_*` (before w) and `acceptance_*` (a, in training too) there are, each with its `_denoms`: by place,
    `confidence_error_sums`, of |σ(confidence) - a|, with a confidence head; and (1,), over the blocks with a label that counts,
    `accept_len_sums`, the leading labels that are the argmax, and `tau_sums`, the expected number of accepted proposals under
    rejection sampling (SpecForge's `tau_probabilistic` is one more). All of them are computed on the true tokens; as long as a
    prefix is correct, the draft's own tokens are these.
    """

    spec, name = DSPARK, DSPARK.name

    def __init__(self, options: DSparkOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = self.max_draft_tokens = options.block_size
        sizes = DSparkSizes(
            markov_head_type=options.markov_head_type,
            markov_rank=options.markov_rank,
            confidence_head=options.confidence_head,
            confidence_with_markov=options.confidence_with_markov,
        )
        generator = torch.Generator().manual_seed(derive_sample_seed(seed, "heads"))
        self.model = DSparkDraft(self.backbone, sizes, generator)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the anchors depend on the step of `ctx`."""
        ids, options = batch["input_ids"], self.options
        blocks = self.draw_blocks(batch, ctx)
        labelled = replace(blocks, size=1 + options.block_size)
        label_mask = make_label_mask(labelled, batch["loss_mask"], contiguous=True)
        objective = DSparkObjective(
            weigh=self.weigh,
            ce_weight=options.ce_weight,
            tv_weight=options.tv_weight,
            confidence_weight=options.confidence_weight,
            chunk_blocks=options.choose_chunk_blocks(ids.device),
            temperatures=Temperatures.choose(options, ctx),
        )
        labels = gather_labels(labelled, ids)
        result = self.model(ids, batch["features"], batch["last"], blocks, labels, label_mask, objective)
        weight = self.compute_loss_weight(label_mask, len(batch["draws"]))
        return StepOutput(result.loss, weight.to(result.loss.dtype), _sums(result, label_mask, ctx))

    def drafter(self) -> Drafter:
        return BlockDrafter(self.model, DFlashDrafter(self.backbone, self.tap_names))


def _sums(result: DSparkLosses, label_mask: Tensor, ctx: StepContext) -> dict[str, Tensor]:
    labels = label_mask.sum(dim=(0, 1), dtype=torch.float64)
    blocks = label_mask.any(-1).sum(dtype=torch.float64)[None]
    by_place = {"loss": result.loss_sums, "acceptance": result.acceptance_sums}
    if result.confidence_errors is not None:
        by_place["confidence_error"] = result.confidence_errors
    by_block = {"accept_len": result.accepted[None], "tau": result.tau[None]}
    return {
        "acc_corrects": result.corrects,
        "acc_denoms": labels,
        **{f"{name}_sums": sums for name, sums in (by_place | by_block).items()},
        **{f"{name}_denoms": labels for name in by_place},
        **{f"{name}_denoms": blocks for name in by_block},
        **name_served_sums(ctx, result.served, labels),
    }
