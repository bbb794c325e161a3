"""Domino as a draft strategy: DFlash's batches and anchors, a loss of two parts that follows a schedule, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftworks.drafts.anchors import derive_sample_seed, gather_labels, make_label_mask
from draftworks.drafts.documents import Documents
from draftworks.drafts.strategy import Drafter, DraftStrategy, StepContext, StepOutput
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash.block_drafter import BlockDrafter
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.domino.loss import DominoObjective
from draftworks.strategies.domino.model import DominoDraft, DominoSizes
from draftworks.strategies.domino.options import DOMINO, DominoOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class DominoStrategy(DraftStrategy):
    """Blocks at DFlash's anchors, where each label is predicted knowing the true tokens before it in the block.

    With w the weight of a label as in DFlash (`gamma`; D-PACE, which no peer has for Domino, takes its confidences from the
    corrected logits, as it is by these that a server gets to a label), λ = `DominoOptions.lambda_base` and both cross-entropies
    under the target's head:

        loss_sum = Σ w·((1 - λ)·CE(corrected) + λ·CE(base)),   loss_weight = Σ w, with D-PACE as in DFlash

    The modes of `options.loss` are those of DFlash. SpecForge adds 1e-6 to the weight, which is left out.

    λ depends on the step and the number of steps alone, so a resumed training goes on with it. An evaluation takes λ = 0 whatever
    the step: its loss is that of what is served, and can be compared between steps.

    Beside DFlash's counts, all of the corrected proposals, there are `base_acc_corrects` (k,) of those before the correction, and
    (1,) each `accept_len_sums` and `base_accept_len_sums`, leading labels of a block that are the first choice, over
    the blocks with a label that counts. These are lengths on the draft's own words: as long as a prefix
    is right, its words are the true tokens. SpecForge's `accept_len` is one more.
    """

    name = DOMINO.name
    model_methods = ("propose",)

    def __init__(self, options: DominoOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        self.options = options
        self._dflash = DFlashStrategy(options, target, vocab, seed)
        self.feature_names = self._dflash.feature_names
        # A server asks for one less than a block has tokens, even where all of them could propose.
        self.draft_tokens, self.max_draft_tokens = options.block_size - 1, options.labels
        generator = torch.Generator().manual_seed(derive_sample_seed(seed, "correction"))
        sizes = DominoSizes(
            emb_dim=options.emb_dim,
            gru_hidden_dim=options.gru_hidden_dim,
            pure_draft_prefix_len=options.pure_draft_prefix_len,
            first_row=0 if options.shift_label else 1,
        )
        self.model = DominoDraft(self._dflash.model, sizes, generator)

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        return self._dflash.collate(samples, sample_ids)

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        return self._dflash.pack(samples, sample_ids)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """See the class for what the sums mean. The step of `ctx` decides the anchors of a training, and λ with its horizon."""
        ids, options = batch["input_ids"], self.options
        blocks = self._dflash.blocks(batch, ctx)
        labelled = replace(blocks, size=1 + options.labels)
        label_mask = make_label_mask(labelled, batch["loss_mask"], contiguous=options.loss == "token_mean")
        share = options.lambda_base(ctx.global_step, ctx.total_steps) if ctx.training else 0.0
        objective = DominoObjective(self._dflash.weigh, share, options.objective_chunk_blocks)
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
        weight = self._dflash.loss_weight(label_mask, len(batch["draws"]))
        return StepOutput(result.loss, weight.to(result.loss.dtype), sums)

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        if count > self.max_draft_tokens:
            raise ConfigError(
                f"domino: a block of {self.options.block_size} proposes {self.max_draft_tokens} tokens, asked for {count}: "
                f"set evaluation.draft_tokens to at most {self.max_draft_tokens}"
            )
        return self.model.propose(batch["input_ids"], batch["features"], position_mask, count, Documents.of(batch))

    def drafter(self) -> Drafter:
        return BlockDrafter(self.model, DFlashDrafter(self.model.backbone, self.feature_names))

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return self._dflash.fsdp_blocks()

    def config(self) -> dict[str, Any]:
        """DFlash's, with the options of the correction among the others."""
        return {**self._dflash.config(), "strategy": self.name}
