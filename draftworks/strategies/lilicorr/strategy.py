"""LiLiCorr as a draft strategy: DFlash's batches and anchors, the reranker's loss beside DFlash's, metric sums."""

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
from draftworks.strategies.lilicorr.lattice import LatticeSizes
from draftworks.strategies.lilicorr.loss import LiLiCorrObjective
from draftworks.strategies.lilicorr.model import LiLiCorrDraft
from draftworks.strategies.lilicorr.options import LILICORR, LiLiCorrOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class LiLiCorrStrategy(DFlashStrategy):
    """Blocks at DFlash's anchors; the candidates of a block are scored given the true tokens before them.

    With w DFlash's weight of a label, and the terms of draftworks.strategies.lilicorr.loss,

        loss_sum = Σ w·CE + Σ (terms of the places that are taught),   loss_weight = Σ w, with D-PACE as in DFlash

    Model-Optimizer divides the terms by the number of places taught, and DFlash's loss by Σ w. One normaliser for both keeps a
    loss the same however samples are batched; the share of places that are taught then stays in the terms.

    Beside DFlash's metric sums, all of the reranked proposals given the true tokens before them, there are by place
    `base_acc_corrects`, the backbone's argmaxes, and `in_lattice_sums`, the labels among the candidates; and, (1,) each,
    `accept_len_sums`, `base_accept_len_sums` and `lattice_len_sums`: the leading labels of a block that are chosen, the
    backbone's argmax, and candidates, over the blocks with a label that counts. The last bounds what a reranker can reach.
    """

    spec, name = LILICORR, LILICORR.name

    def __init__(self, options: LiLiCorrOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        size = options.resolve_lattice_size(self.target.hidden_size)
        sizes = LatticeSizes(
            hidden_size=self.target.hidden_size,
            size=size,
            layers=options.lattice_layers,
            heads=options.lattice_heads,
            mlp_size=int(size * options.lattice_mlp_ratio),
            places=options.block_size - 1,
            candidates=options.candidate_topk,
            factor_dim=options.factor_dim or size,
            rms_norm_eps=self.target.rms_norm_eps,
            vector_eps=options.vector_eps,
            logit_scale=options.logit_scale,
        )
        generator = torch.Generator().manual_seed(derive_sample_seed(seed, "lattice"))
        self.model = LiLiCorrDraft(self.backbone, sizes, generator)

    def make_layer(
        self, target: TargetParts, sizes: DFlashSizes, window: Window | None, generator: torch.Generator
    ) -> DFlashLayer:
        taps, group_size = self.options.conv_kernel_size, self.options.conv_group_size
        if taps is None:
            return super().make_layer(target, sizes, window, generator)
        return DFlash2Layer(target, sizes, window, generator, taps, group_size)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the anchors depend on the step of `ctx`."""
        ids, options = batch["input_ids"], self.options
        blocks = self.draw_blocks(batch, ctx)
        label_mask = make_label_mask(blocks, batch["loss_mask"], contiguous=options.loss == "token_mean")
        objective = LiLiCorrObjective(
            weigh=self.weigh,
            ce_weight=options.ce_weight,
            margin_weight=options.margin_weight,
            margin=options.margin,
            penalty_weight=options.penalty_weight,
            candidates=options.candidate_topk,
            chunk_blocks=options.choose_chunk_blocks(ids.device),
        )
        labels = gather_labels(blocks, ids)
        result = self.model(ids, batch["features"], batch["last"], blocks, labels, label_mask, objective)
        supervised = label_mask.sum(dim=(0, 1), dtype=torch.float64)
        labelled_blocks = label_mask.any(-1).sum(dtype=torch.float64)[None]
        lengths = {
            "accept_len": result.accepted,
            "base_accept_len": result.base_accepted,
            "lattice_len": result.reachable,
        }
        sums = {
            "acc_corrects": result.corrects,
            "acc_denoms": supervised,
            "loss_sums": result.ce_sums,
            "loss_denoms": supervised,
            "base_acc_corrects": result.base_corrects,
            "in_lattice_sums": result.found,
            "in_lattice_denoms": supervised,
            **{f"{name}_sums": total[None] for name, total in lengths.items()},
            **dict.fromkeys((f"{name}_denoms" for name in lengths), labelled_blocks),
        }
        weight = self.compute_loss_weight(label_mask, len(batch["draws"]))
        return StepOutput(result.loss, weight.to(result.loss.dtype), sums)

    def drafter(self) -> Drafter:
        return BlockDrafter(self.model, DFlashDrafter(self.backbone, self.tap_names))
