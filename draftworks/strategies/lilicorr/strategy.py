"""LiLiCorr as a draft strategy: DFlash's batches and anchors, the reranker's loss beside DFlash's, metric sums."""

from __future__ import annotations

import torch

from draftworks.drafts.attention import Window
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.model import DFlashLayer, DFlashSizes
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dflash2.model import DFlash2Layer
from draftworks.strategies.lilicorr.model import LiLiCorrDraft
from draftworks.strategies.lilicorr.options import LILICORR


class LiLiCorrStrategy(DFlashStrategy):
    """Blocks at DFlash's anchors; the candidates of a block are scored given the true tokens before them.

    With w DFlash's weight of a label, and the terms of draftworks.strategies.lilicorr.model,

        loss_sum = Σ w·CE + Σ (terms of the places that are taught),   loss_weight = Σ w, with D-PACE as in DFlash

    Model-Optimizer divides the terms by the number of places taught, and DFlash's loss by Σ w. One normaliser for both keeps a
    loss the same however samples are batched; the share of places that are taught then stays in the terms.

    Beside DFlash's metric sums, all of the reranked proposals given the true tokens before them, there are by place
    `base_acc_corrects`, the backbone's argmaxes, and `in_lattice_sums`, the labels among the candidates; and, (1,) each,
    `accept_len_sums`, `base_accept_len_sums` and `lattice_len_sums`: the leading labels of a block that are chosen, the
    backbone's argmax, and candidates, over the blocks with a label that counts. The last bounds what a reranker can reach.
    """

    spec, name = LILICORR, LILICORR.name

    def make_draft(self) -> LiLiCorrDraft:
        return LiLiCorrDraft(self.backbone, self.options, self.make_generator("lattice"))

    def make_layer(
        self, target: TargetParts, sizes: DFlashSizes, window: Window | None, generator: torch.Generator
    ) -> DFlashLayer:
        taps, group_size = self.options.conv_kernel_size, self.options.conv_group_size
        if taps is None:
            return super().make_layer(target, sizes, window, generator)
        return DFlash2Layer(target, sizes, window, generator, taps, group_size)
