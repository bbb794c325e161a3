"""XPress as a draft strategy: DFlash's batches and anchors, a loss of several passes, metric sums."""

from __future__ import annotations

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
from draftworks.strategies.xpress.loss import XPressLosses, XPressObjective
from draftworks.strategies.xpress.model import XPressDraft
from draftworks.strategies.xpress.options import XPRESS, XPressOptions
from draftworks.strategies.xpress.refiner import RefinerSizes

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class XPressStrategy(DFlashStrategy):
    """Blocks at DFlash's anchors; the refiner is trained on the true tokens, and on the draft's own.

    The loss is in draftworks.strategies.xpress.loss. The weight w of a label is DFlash's: by place (`gamma`), or D-PACE.
    In both modes of `options.loss` the labels of a block are those up to the end of the anchor's answer; loss_weight =
    Σ of the weights by place, or with `specforge` and D-PACE the number of samples, as in DSpark. (speculators 0.9.0
    divides by the number of labels.) Evaluations compute the same loss as training.

    Beside `acc_*`, `loss_*` (before w) and `acceptance_*`, all of the pass on the true tokens, there are, (1,) each with
    its `_denoms`, over the blocks with a label that counts: `accept_len_sums` and `base_accept_len_sums`, the leading
    labels that are the argmax with the refiner and without, and `tau_sums`, the expected number of accepted proposals
    under rejection sampling.
    """

    spec, name = XPRESS, XPRESS.name

    def __init__(self, options: XPressOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        generator = torch.Generator().manual_seed(derive_sample_seed(seed, "refiner"))
        sizes = RefinerSizes(options.refiner_rank, options.mlp_ratio, options.block_size)
        self.model = XPressDraft(self.backbone, sizes, options.jacobi_passes, generator)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the anchors depend on the step of `ctx`."""
        ids, options = batch["input_ids"], self.options
        blocks = self.draw_blocks(batch, ctx)
        label_mask = make_label_mask(blocks, batch["loss_mask"], contiguous=True)
        objective = XPressObjective(
            weigh=self.weigh,
            ce_weight=options.ce_weight,
            tv_weight=options.tv_weight,
            rounds=options.consistency_passes if options.consistency_weight > 0 else 0,
            consistency_weight=options.consistency_weight,
            base_weight=options.base_weight,
            chunk_blocks=options.choose_chunk_blocks(ids.device),
            temperatures=Temperatures.choose(options, ctx),
        )
        labels = gather_labels(blocks, ids)
        result = self.model(ids, batch["features"], batch["last"], blocks, labels, label_mask, objective)
        weight = self.compute_loss_weight(label_mask, len(batch["draws"]))
        return StepOutput(result.loss, weight.to(result.loss.dtype), _sums(result, label_mask, ctx))

    def drafter(self) -> Drafter:
        return BlockDrafter(self.model, DFlashDrafter(self.backbone, self.tap_names))


def _sums(result: XPressLosses, label_mask: Tensor, ctx: StepContext) -> dict[str, Tensor]:
    labels = label_mask.sum(dim=(0, 1), dtype=torch.float64)
    blocks = label_mask.any(-1).sum(dtype=torch.float64)[None]
    by_place = {"loss": result.loss_sums, "acceptance": result.acceptance_sums}
    by_block = {"accept_len": result.accepted, "base_accept_len": result.base_accepted, "tau": result.tau}
    return {
        "acc_corrects": result.corrects,
        "acc_denoms": labels,
        **{f"{name}_sums": sums for name, sums in by_place.items()},
        **{f"{name}_sums": sums[None] for name, sums in by_block.items()},
        **{f"{name}_denoms": labels for name in by_place},
        **{f"{name}_denoms": blocks for name in by_block},
        **name_served_sums(ctx, result.served, labels),
    }
