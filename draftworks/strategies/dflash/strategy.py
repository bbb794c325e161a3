"""DFlash as a draft strategy (arXiv 2602.06036), with the weights of D-PACE: batches, loss modes, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftworks.drafts.anchors import Blocks, derive_sample_seed, draw_blocks, gather_labels, make_label_mask
from draftworks.drafts.collation import BatchLayout, collate_features, sample_lengths
from draftworks.drafts.documents import Documents
from draftworks.drafts.option_defaults import resolve_head_counts, resolve_mask_token
from draftworks.drafts.strategy import Drafter, DraftStrategy, StepContext, StepOutput
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.loss import LabelWeighting, decaying_weights, dpace_weights, uniform_weights
from draftworks.strategies.dflash.model import DFlashDraft, DFlashSizes
from draftworks.strategies.dflash.options import DFLASH, DFlashOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class DFlashStrategy(DraftStrategy):
    """Blocks at up to `num_anchors` anchors of a sample, drawn anew at every step; labels are the tokens themselves.

    With CE the cross-entropy of a label under the target's head, and w its weight by place (`gamma`) or confidence
    (`weighting`), the modes of `options.loss` are:

    `token_mean`: labels up to the end of the anchor's answer; loss_sum = Σ CE·w, loss_weight = Σ of the weights by place.
    `specforge`: SpecForge's: every label under the loss mask, an answer after the next question too; loss_weight as
        above, with D-PACE the number of samples.

    Evaluation draws as training does, but always the same anchors, whatever the seed of the training. `acc_corrects`
    counts labels that are the draft's first choice, place by place; a block is not fed the labels before.
    """

    name = DFLASH.name
    model_methods = ("propose",)

    def __init__(self, options: DFlashOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        if vocab is not None:
            raise ConfigError(
                f"{options.strategy} predicts over the target's whole vocabulary: expected no vocabulary mapping"
            )
        self.options = options
        self.draft_tokens = self.max_draft_tokens = options.block_size - 1
        self.feature_names = DFLASH.list_features(target.num_layers, options)
        self._target = target = target.with_layer_options(options)
        self._seed = seed
        self._sizes = _sizes(options, target, taps=len(self.feature_names))
        self.model = DFlashDraft(target, self._sizes, torch.Generator().manual_seed(seed))

    def collate(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """Right-pad; taps side by side in `features` (B, S, taps · H). `draws`, `eval_draws` (B,) are where anchors come from."""
        return self._laid_out(samples, sample_ids, BatchLayout.padded(sample_lengths(samples)))

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        """The same in one row without padding, B = 1; `draws`, `eval_draws` are still one for each sample."""
        return self._laid_out(samples, sample_ids, BatchLayout.packed(sample_lengths(samples)))

    def _laid_out(
        self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str], layout: BatchLayout
    ) -> TrainBatch:
        batch = collate_features(samples, sample_ids, self.feature_names, self._target.hidden_size, layout)
        batch["draws"] = torch.tensor([derive_sample_seed(self._seed, name) for name in sample_ids])
        batch["eval_draws"] = torch.tensor([derive_sample_seed(0, name) for name in sample_ids])
        return TrainBatch(batch, tuple(sample_ids), sum(sample_lengths(samples)), layout.documents)

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """See the class for what the sums mean. The step of `ctx` decides the anchors of a training."""
        mask, ids = batch["loss_mask"], batch["input_ids"]
        blocks = self.blocks(batch, ctx)
        label_mask = make_label_mask(blocks, mask, contiguous=self.options.loss == "token_mean")
        result = self.model(
            ids,
            batch["features"],
            blocks,
            gather_labels(blocks, ids),
            label_mask,
            self.weigh,
            self.options.objective_chunk_blocks,
        )
        supervised = label_mask.sum(dim=(0, 1), dtype=torch.float64)
        sums = {
            "acc_corrects": result.corrects,
            "acc_denoms": supervised,
            "loss_sums": result.ce_sums,
            "loss_denoms": supervised,
        }
        return StepOutput(result.loss, self.loss_weight(label_mask, len(batch["draws"])).to(result.loss.dtype), sums)

    def blocks(self, batch: TrainBatch, ctx: StepContext) -> Blocks:
        """Those that the loss looks at; see the class."""
        mask, documents = batch["loss_mask"], Documents.of(batch)
        candidates = mask & documents.shift_left(mask, 1)
        seeds, step = (batch["draws"], ctx.global_step) if ctx.training else (batch["eval_draws"], 0)
        return draw_blocks(candidates, seeds, step, self.options.num_anchors, self.options.block_size, documents)

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        self._check_count(count)
        return self.model.propose(batch["input_ids"], batch["features"], position_mask, count, Documents.of(batch))

    def drafter(self) -> Drafter:
        return DFlashDrafter(self.model, self.feature_names)

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return tuple(self.model.layers)

    def config(self) -> dict[str, Any]:
        sizes = self._sizes
        return {
            "strategy": self.name,
            "options": self.options.identity(),
            "feature_names": list(self.feature_names),
            "hidden_size": self._target.hidden_size,
            "head_dim": self._target.head_dim,
            "num_heads": sizes.num_heads,
            "num_kv_heads": sizes.num_kv_heads,
            "intermediate_size": sizes.intermediate_size,
            "taps": sizes.taps,
            "num_layers": self.options.num_layers,
            "block_size": sizes.block_size,
            "mask_token_id": sizes.mask_token_id,
            "num_target_layers": self._target.num_layers,
            "rms_norm_eps": self._target.rms_norm_eps,
            "rope_parameters": dict(self._target.rope),
            "max_position_embeddings": self._target.max_positions,
            "vocab_size": self._target.vocab_size,
            **({} if self._target.embedding_scale == 1 else {"embedding_scale": self._target.embedding_scale}),
        }

    @property
    def _by_place(self) -> LabelWeighting:
        return uniform_weights if self.options.gamma is None else decaying_weights(self.options.gamma)

    @property
    def weigh(self) -> LabelWeighting:
        """Factors of the loss, from the cross-entropies."""
        options = self.options
        return (
            self._by_place if options.weighting == "uniform" else dpace_weights(options.dpace_alpha, options.weighting)
        )

    def loss_weight(self, label_mask: Tensor, samples: int) -> Tensor:
        """Scalar, from which labels count (B, A, k) and of how many samples these are."""
        if self.options.loss == "specforge" and self.options.weighting != "uniform":
            return torch.full((), float(samples), device=label_mask.device)
        flat = label_mask.flatten(0, 1)
        return self._by_place(torch.zeros(flat.shape, dtype=torch.float64, device=flat.device), flat).sum()

    def _check_count(self, count: int) -> None:
        if count > self.draft_tokens:
            raise ConfigError(
                f"dflash: a block of {self.options.block_size} proposes {self.draft_tokens} tokens, asked for {count}: "
                f"set evaluation.draft_tokens to at most {self.draft_tokens}"
            )


def _sizes(options: DFlashOptions, target: TargetParts, taps: int) -> DFlashSizes:
    return DFlashSizes(
        **resolve_head_counts(options.strategy, options, target)._asdict(),
        intermediate_size=options.intermediate_size or target.intermediate_size,
        taps=taps,
        block_size=options.block_size,
        mask_token_id=resolve_mask_token(options.strategy, options, target),
        windows=options.windows(),
        backend=options.attention,
        strategy=options.strategy,
    )
