"""Domino as a draft strategy: DFlash's batches and anchors, a loss of two parts with a schedule, metric sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.domino.model import DominoDraft
from draftworks.strategies.domino.options import DOMINO, DominoOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class DominoStrategy(DFlashStrategy):
    """Blocks at DFlash's anchors; each label is predicted from the true tokens before it in the block.

    With w the weight of a label as in DFlash (D-PACE, which no peer has for Domino, takes its confidences from the corrected
    logits, because these decide whether a server reaches a label), λ = `DominoOptions.lambda_base`, and both cross-entropies
    under the target's head:

        loss_sum = Σ w·((1 - λ)·CE(corrected) + λ·CE(base)),   loss_weight = Σ w, with D-PACE as in DFlash

    The modes of `options.loss` are those of DFlash. SpecForge adds 1e-6 to the weight; here it is left out.

    λ depends only on the step and the number of steps, so a resumed training continues its schedule. An evaluation takes λ = 0 at
    any step: its loss is that of the served logits, and comparable between steps.

    Beside DFlash's metric sums, all of the corrected proposals, there are `base_acc_corrects` (k,) without the correction, and,
    (1,) each, `accept_len_sums` and `base_accept_len_sums`: the leading labels of a block that are the argmax, over the blocks
    with a label that counts. These are also the lengths on the draft's own tokens: as long as a prefix is correct, its tokens
    are the true ones. SpecForge's `accept_len` is one more.
    """

    spec, name = DOMINO, DOMINO.name

    def __init__(self, options: DominoOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        # draft_tokens stays block_size - 1, which is what a server asks for, even if all places can propose.
        self.max_draft_tokens = options.labels

    def make_draft(self) -> DominoDraft:
        return DominoDraft(self.backbone, self.options, self.make_generator("correction"))
