"""DFlash 2 as a draft strategy: DFlash's batches and anchors, a backbone with convolutions, a loss of two parts."""

from __future__ import annotations

import torch

from draftworks.drafts.attention import Window
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.model import DFlashLayer, DFlashSizes
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dflash2.model import DFlash2Draft, DFlash2Layer
from draftworks.strategies.dflash2.options import DFLASH2


class DFlash2Strategy(DFlashStrategy):
    """Blocks at DFlash's anchors; the selector reads the true token before each label.

    The loss of a label is in draftworks.strategies.dflash2.model, its weights are DFlash's: by place (`gamma`), the same for
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

    def make_draft(self) -> DFlash2Draft:
        return DFlash2Draft(self.backbone, self.options, self.make_generator("selector"))

    def make_layer(
        self, target: TargetParts, sizes: DFlashSizes, window: Window | None, generator: torch.Generator
    ) -> DFlashLayer:
        taps, group_size = self.options.conv_kernel_size, self.options.conv_group_size
        return DFlash2Layer(target, sizes, window, generator, taps, group_size)
