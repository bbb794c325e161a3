"""DFlash as a draft strategy (arXiv 2602.06036), with the label weights of D-PACE; and the serving form of block drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Generator, Tensor, nn

from draftworks.config.strategies import MetricSums
from draftworks.drafts.anchors import Blocks, derive_sample_seed, draw_blocks, gather_labels, make_label_mask
from draftworks.drafts.attention import DraftAttention, KeyValue, Window
from draftworks.drafts.decoder_strategy import DecoderStrategy, resolve_mask_token
from draftworks.drafts.documents import BatchLayout, Documents
from draftworks.drafts.objectives import LossSettings
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal, StepContext, StepOutput
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash.loss import choose_place_weighting
from draftworks.strategies.dflash.model import (
    BlockDraft,
    BlockStates,
    DFlashDraft,
    DFlashLayer,
    DFlashSizes,
    LabelledBlocks,
)
from draftworks.strategies.dflash.options import DFLASH, DFlashOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class BlockDrafter(Drafter):
    """Drafter whose context is the target's features so far; the anchor is the token after them.

    The backbone computes a block's states once, then tokens are decoded one after another.

    Args:
        taps: names of the features, in the order in which `fc` reads them.
    """

    def __init__(self, draft: BlockDraft, taps: Sequence[str]) -> None:
        self._draft, self._model = draft, draft.backbone
        self._taps = tuple(taps)
        self._length = 0
        self._context: list[KeyValue] = []
        self._anchor: Tensor | None = None
        self._last: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        model, count = self._model, len(next_tokens)
        context = model.fuse_context(torch.cat([features[tap] for tap in self._taps], dim=-1)[None])
        rotation = model.rotary(self._length + count, context.dtype).window(self._length, count)
        new = [layer.self_attn.project_key_value(context, rotation) for layer in _layers(model)]
        self._context = [old.concat(fresh) for old, fresh in zip(self._context, new)] if self._context else new
        self._length += count
        self._anchor, self._last = next_tokens[-1:], context[:, -1]

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        block = self.compute_states()
        if temperature == 0:
            return Proposal(self._draft.decode(block, count, lambda logits: logits.argmax(-1))[0])
        drawn_from: list[Tensor] = []

        def sample(logits: Tensor) -> Tensor:
            drawn_from.append(distribution(logits[0], temperature))
            return draw(drawn_from[-1], generator)[None]

        tokens = self._draft.decode(block, count, sample)[0]
        return Proposal(tokens, torch.stack(drawn_from))

    @torch.no_grad()
    def compute_states(self) -> BlockStates:
        """Return the block that begins at the last known token, n = 1."""
        if self._anchor is None or self._last is None:
            raise RuntimeError("propose was called before extend")
        model = self._model
        where = torch.tensor([[self._length]], device=self._anchor.device)
        block = Blocks(where, torch.ones_like(where, dtype=torch.bool), model.block_size)
        rotation = model.get_rotation(block.positions, self._length + model.block_size)
        hidden, attend = model.embed_blocks(self._anchor[None]), DraftAttention(block.make_seen_keys(self._length))
        for layer, context in zip(_layers(model), self._context, strict=True):
            hidden = layer.forward_cached(hidden, context, rotation, attend)
        return BlockStates(hidden, self._anchor, self._last)


def _layers(model: DFlashDraft) -> list[DFlashLayer]:
    return cast("list[DFlashLayer]", list(model.layers))


class DFlashStrategy(DecoderStrategy):
    """Blocks at up to `num_anchors` anchors of a sample, drawn at every step; labels are the tokens themselves.

    CE is the cross-entropy of a label under the target's head, w its weight by place (`gamma`) or confidence (`weighting`).
    The modes of `options.loss`:

    `token_mean`: labels up to the end of the anchor's answer; loss_sum = Σ CE·w, loss_weight = Σ of the weights by place.
    `specforge`: SpecForge's rule: every label under the loss mask, also in an answer after the next question;
        loss_weight as above, with D-PACE the number of samples.

    Evaluation draws anchors as training does, but always the same ones, independent of the training's seed. `acc_corrects`
    are the labels that are the draft's argmax, by place; a proposal does not depend on the labels before it.
    """

    spec, name = DFLASH, DFLASH.name
    labels_end_with_answer: ClassVar[bool] = False
    """Whether labels of the next answer are left out in `specforge` too."""

    def __init__(self, options: DFlashOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = self.max_draft_tokens = options.block_size - 1
        self._sizes = DFlashSizes(
            **self.resolve_layer_sizes(),
            block_size=options.block_size,
            mask_token_id=resolve_mask_token(self.name, options, self.target),
            windows=tuple(_make_window(size, options.sliding_window_kind) for size in options.layer_windows()),
            backend=options.attention,
            strategy=self.name,
        )
        self.backbone = DFlashDraft(self.target, self._sizes, torch.Generator().manual_seed(seed), self.make_layer)
        self.model = self.make_draft()

    def make_draft(self) -> BlockDraft:
        """Return the model; a strategy that is built on DFlash returns the backbone with a head of its own."""
        return self.backbone

    def make_generator(self, part: str) -> torch.Generator:
        """Return the only source of randomness of a head's initial weights."""
        return torch.Generator().manual_seed(derive_sample_seed(self.seed, part))

    def make_layer(
        self, target: TargetParts, sizes: DFlashSizes, window: Window | None, generator: torch.Generator
    ) -> DFlashLayer:
        """Return a layer of the backbone; a strategy that is built on DFlash may override this."""
        return DFlashLayer(target, sizes, window, generator)

    def complete_batch(
        self, tensors: dict[str, Tensor], sample_ids: Sequence[str], layout: BatchLayout
    ) -> dict[str, Tensor]:
        """Add `draws` and `eval_draws`, one int64 each for each sample, which its anchors are drawn from."""
        for name, seed in (("draws", self.seed), ("eval_draws", 0)):
            tensors[name] = torch.tensor([derive_sample_seed(seed, sample_id) for sample_id in sample_ids])
        return tensors

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the anchors depend on the step of `ctx`."""
        assert self.max_draft_tokens is not None, "a block has an end"
        ids, blocks = batch["input_ids"], self.draw_blocks(batch, ctx)
        labelled = replace(blocks, size=1 + self.max_draft_tokens)
        contiguous = self.labels_end_with_answer or self.options.loss == "token_mean"
        label_mask = make_label_mask(labelled, batch["loss_mask"], contiguous)
        last = batch["last"] if self.spec.uses_last_hidden else None
        rows = LabelledBlocks(ids, batch["features"], last, blocks, gather_labels(labelled, ids), label_mask)
        result = self.model(rows, LossSettings.of(self.options, ctx))
        weight = self.compute_loss_weight(label_mask, len(batch["draws"])).to(result.loss.dtype)
        return StepOutput(result.loss, weight, result.sums | self._count_labels(result.sums, label_mask))

    def _count_labels(self, sums: Mapping[str, Tensor], label_mask: Tensor) -> dict[str, Tensor]:
        """Return the denominators of metric sums: labels by place, (k,), or blocks with a label that counts, (1,)."""
        labels, blocks = label_mask.sum(dim=(0, 1), dtype=torch.float64), label_mask.any(-1).sum(dtype=torch.float64)
        declared = self.spec.metric_sums(self.options) if self.spec.metric_sums else MetricSums(len(labels))
        names = [name.removesuffix("_sums") for name in sums if name.endswith("_sums")]
        denoms = {f"{name}_denoms": blocks[None] if name in declared.by_block else labels for name in names}
        return {"acc_denoms": labels, **denoms}

    def draw_blocks(self, batch: TrainBatch, ctx: StepContext) -> Blocks:
        """Return the blocks of the loss; see the class."""
        mask, documents = batch["loss_mask"], Documents.of(batch)
        candidates = mask & documents.shift_left(mask, 1)
        seeds, step = (batch["draws"], ctx.global_step) if ctx.training else (batch["eval_draws"], 0)
        return draw_blocks(candidates, seeds, step, self.options.num_anchors, self.options.block_size, documents)

    def drafter(self) -> Drafter:
        return BlockDrafter(self.model, self.tap_names)

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        return tuple(self.backbone.layers)

    def config(self) -> dict[str, Any]:
        scale = self.target.embedding_scale
        return super().config() | ({} if scale == 1 else {"embedding_scale": scale})

    def describe_sizes(self) -> dict[str, Any]:
        return {
            **self.resolve_layer_sizes(),
            "num_layers": self.options.num_layers,
            "block_size": self._sizes.block_size,
            "mask_token_id": self._sizes.mask_token_id,
            "num_target_layers": self.target.num_layers,
        }

    def compute_loss_weight(self, label_mask: Tensor, samples: int) -> Tensor:
        """Return `StepOutput.loss_weight` from the label mask (B, A, k) and the number of samples."""
        if self.options.loss == "specforge" and self.options.weighting != "uniform":
            return torch.full((), float(samples), device=label_mask.device)
        flat = label_mask.flatten(0, 1)
        weigh = choose_place_weighting(self.options)
        return weigh(torch.zeros(flat.shape, dtype=torch.float64, device=flat.device), flat).sum()


def _make_window(size: int | None, kind: str) -> Window | None:
    return None if size is None else Window(size, from_anchor=kind != "token", both_ways=kind == "anchor_both_ways")
