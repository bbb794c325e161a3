"""DFlash 2 as a draft strategy: DFlash's batches and anchors, a backbone with convolutions, a loss of two parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftworks.drafts.anchors import derive_sample_seed, gather_labels, make_label_mask
from draftworks.drafts.attention import Window
from draftworks.drafts.strategy import Drafter, StepContext, StepOutput
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash.block_drafter import BlockDrafter
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.model import DFlashLayer, DFlashSizes
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dflash2.layers import DFlash2Layer
from draftworks.strategies.dflash2.loss import DFlash2Objective
from draftworks.strategies.dflash2.model import DFlash2Draft, SelectorSizes
from draftworks.strategies.dflash2.options import DFLASH2, DFlash2Options

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class DFlash2Strategy(DFlashStrategy):
    """Blocks at DFlash's anchors; the selector reads the true token before each label.

    The loss of a label is in draftworks.strategies.dflash2.loss, its weights are DFlash's: by place (`gamma`), the same for
    both parts, or D-PACE, which takes those of each part from its own cross-entropies, as speculators does. The modes of
    `options.loss` and the loss weight are those of DFlash: Σ of the weights by place, or with D-PACE and `specforge` the
    number of samples. (speculators divides by the number of labels.)

    Labels are the tokens of the answer, as in SpecForge; speculators takes the target's argmax, which for greedy answers is
    the same, and teaches the backbone the target's distribution by default.

    Metric sums by place: `acc_*`, labels that the selector chooses; `recall_*`, labels among the candidates; `loss_*`, what
    labels cost before weights, and `selector_loss_*`, the selector's part of it. And, (1,) each, over the blocks with a label
    that counts, `accept_len_*` and `base_accept_len_*`: the leading labels of a block that the selector chooses, and that are
    the argmax of the backbone. These are also the lengths on the draft's own tokens: as long as a prefix is right, its tokens
    are the true ones.
    """

    spec, name = DFLASH2, DFLASH2.name

    def __init__(self, options: DFlash2Options, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        generator = torch.Generator().manual_seed(derive_sample_seed(seed, "selector"))
        sizes = SelectorSizes(options.selector_rank, options.selector_top_k)
        self.model = DFlash2Draft(self.backbone, sizes, generator)

    def make_layer(
        self, target: TargetParts, sizes: DFlashSizes, window: Window | None, generator: torch.Generator
    ) -> DFlashLayer:
        taps, group_size = self.options.conv_kernel_size, self.options.conv_group_size
        return DFlash2Layer(target, sizes, window, generator, taps, group_size)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the anchors depend on the step of `ctx`."""
        ids, options = batch["input_ids"], self.options
        blocks = self.draw_blocks(batch, ctx)
        label_mask = make_label_mask(blocks, batch["loss_mask"], contiguous=options.loss == "token_mean")
        objective = DFlash2Objective(
            weigh=self.weigh,
            alpha=options.selector_loss_alpha,
            top_k=options.selector_top_k,
            chunk_blocks=options.choose_chunk_blocks(ids.device),
        )
        result = self.model(ids, batch["features"], blocks, gather_labels(blocks, ids), label_mask, objective)
        supervised = label_mask.sum(dim=(0, 1), dtype=torch.float64)
        labelled_blocks = label_mask.any(-1).sum(dtype=torch.float64)
        sums = {
            "acc_corrects": result.corrects,
            "acc_denoms": supervised,
            "loss_sums": result.loss_sums,
            "selector_loss_sums": result.selector_loss_sums,
            "recall_sums": result.recalled,
            **dict.fromkeys(("loss_denoms", "selector_loss_denoms", "recall_denoms"), supervised),
            "accept_len_sums": result.accepted[None],
            "base_accept_len_sums": result.base_accepted[None],
            **dict.fromkeys(("accept_len_denoms", "base_accept_len_denoms"), labelled_blocks[None]),
        }
        weight = self.compute_loss_weight(label_mask, len(batch["draws"]))
        return StepOutput(result.loss, weight.to(result.loss.dtype), sums)

    def drafter(self) -> Drafter:
        return BlockDrafter(self.model, DFlashDrafter(self.backbone, self.tap_names))
