"""Domino as a draft strategy: DFlash's batches and anchors, a loss of two parts with a schedule, metric sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from draftworks.drafts.anchors import derive_sample_seed, gather_labels, make_label_mask
from draftworks.drafts.strategy import Drafter, StepContext, StepOutput
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash.block_drafter import BlockDrafter
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.domino.loss import DominoObjective
from draftworks.strategies.domino.model import DominoDraft, DominoSizes
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
        generator = torch.Generator().manual_seed(derive_sample_seed(seed, "correction"))
        sizes = DominoSizes(
            emb_dim=options.emb_dim,
            gru_hidden_dim=options.gru_hidden_dim,
            pure_draft_prefix_len=options.pure_draft_prefix_len,
            first_place=0 if options.shift_label else 1,
        )
        self.model = DominoDraft(self.backbone, sizes, generator)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the anchors and λ depend on the step of `ctx`."""
        ids, options = batch["input_ids"], self.options
        blocks = self.draw_blocks(batch, ctx)
        labelled = replace(blocks, size=1 + options.labels)
        label_mask = make_label_mask(labelled, batch["loss_mask"], contiguous=options.loss == "token_mean")
        share = options.compute_lambda_base(ctx.global_step, ctx.total_steps) if ctx.training else 0.0
        objective = DominoObjective(self.weigh, share, options.choose_chunk_blocks(ids.device))
        result = self.model(ids, batch["features"], blocks, gather_labels(labelled, ids), label_mask, objective)
        supervised = label_mask.sum(dim=(0, 1), dtype=torch.float64)
        labelled_blocks = label_mask.any(-1).sum(dtype=torch.float64)
        sums = {
            "acc_corrects": result.corrects,
            "acc_denoms": supervised,
            "loss_sums": result.ce_sums,
            "loss_denoms": supervised,
            "base_acc_corrects": result.base_corrects,
            "accept_len_sums": result.accepted[None],
            "base_accept_len_sums": result.base_accepted[None],
            **dict.fromkeys(("accept_len_denoms", "base_accept_len_denoms"), labelled_blocks[None]),
        }
        weight = self.compute_loss_weight(label_mask, len(batch["draws"]))
        return StepOutput(result.loss, weight.to(result.loss.dtype), sums)

    def drafter(self) -> Drafter:
        return BlockDrafter(self.model, DFlashDrafter(self.backbone, self.tap_names))
