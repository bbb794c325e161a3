"""The DFlash draft model (arXiv 2602.06036): a few layers in which blocks read fused layers of the target as context.

It is a draft by itself, and the backbone of those of the family, whose heads decode the tokens of a block otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks, place_blocks
from draftworks.drafts.attention import DraftAttention, KeyValue, Window
from draftworks.drafts.documents import Documents
from draftworks.drafts.layers import GatedMlp, RmsNorm, Rotary, Rotation, seeded_linear
from draftworks.drafts.logit_losses import LossSums
from draftworks.drafts.objectives import LossSettings
from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.loss import TaughtBlocks, block_cross_entropy

PROPOSE_BLOCKS_AT_ONCE = 64
"""Blocks per document that `propose` holds at a time; every pass reads the whole context of the row."""
DECODE_BLOCKS_AT_ONCE = 128
"""Blocks that get logits at a time in `propose`."""


class BlockStates(NamedTuple):
    """What the tokens of n blocks are decoded from.

    Attributes:
        states: (n, size, H) of the backbone, not normed.
        known: (n,) int64, the anchors' tokens.
        context: (n, H), the fused context at the position before each anchor, the last one that a server has.
    """

    states: Tensor
    known: Tensor
    context: Tensor

    def split(self, size: int) -> Iterator[BlockStates]:
        """Yield `size` blocks at a time."""
        return map(BlockStates._make, zip(*(part.split(size) for part in self), strict=True))


ChooseTokens = Callable[[Tensor], Tensor]
"""From logits (n, V) to the proposed tokens (n,)."""


class LabelledBlocks(NamedTuple):
    """A micro-batch, its blocks, and the k labels of each.

    Attributes:
        input_ids: (B, S) int64.
        features: (B, S, taps · H).
        last: (B, S, H), the target's last hidden states; None where the strategy has no teacher.
        labels, label_mask: (B, A, k), int64 and bool.
    """

    input_ids: Tensor
    features: Tensor
    last: Tensor | None
    blocks: Blocks
    labels: Tensor
    label_mask: Tensor


class BlockDraft(nn.Module, ABC):
    """A draft of the family: the backbone makes the states of a block at once, a head decodes tokens from them.

    A subclass has the backbone, or is it, and adds `compute_loss` and `decode`.
    """

    backbone: DFlashDraft

    @abstractmethod
    def compute_loss(self, blocks: TaughtBlocks, settings: LossSettings) -> LossSums:
        """Return the loss of the labels that count, and its metric sums by the names of `StepOutput`, without `_denoms`."""

    @abstractmethod
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        """Decode the tokens of n blocks one place after another, (n, count) int64.

        Args:
            choose: called once per place, in order.
        """

    def forward(self, batch: LabelledBlocks, settings: LossSettings) -> LossSums:
        """Return `compute_loss` of a micro-batch; called once for each."""
        backbone, blocks, label_mask = self.backbone, batch.blocks, batch.label_mask
        taught = label_mask.any(-1)  # (B, A), on at N blocks
        context = backbone.fuse_context(batch.features)  # (B, S, H)
        states = backbone.compute_states(batch.input_ids, context, blocks)[taught]  # (N, size, H)
        row, anchors = taught.nonzero()[:, 0], blocks.anchors[taught]
        # The label at anchor + 1 + i is predicted by the target at anchor + i, which may be behind the row's end.
        length, places = batch.input_ids.shape[1], torch.arange(label_mask.shape[-1], device=row.device)
        predicted_at = (anchors[:, None] + places).clamp_max(length - 1)
        rows = TaughtBlocks(
            states=backbone.norm(states),
            known=batch.input_ids[row, anchors],
            labels=batch.labels[taught],
            label_mask=label_mask[taught],
            positions=row[:, None] * length + predicted_at,
            last=None if batch.last is None else batch.last.flatten(0, 1),
            context=context[row, (anchors - 1).clamp_min(0)],
            has_context=anchors > blocks.begins[taught],
        )
        return self.compute_loss(rows, settings)

    @torch.no_grad()
    def propose(
        self, input_ids: Tensor, features: Tensor, position_mask: Tensor, count: int, documents: Documents | None = None
    ) -> Tensor:
        """Return what a server would propose at each of many positions, greedily.

        Args:
            position_mask: (B, S) bool: position t proposes tokens t+2 … t+1+count, having seen tokens up to t+1.
            documents: of the batch; None if each batch row is one.

        Returns:
            (B, S, count) int64 ids of the target; -1 at other positions.
        """
        backbone = self.backbone
        context = backbone.fuse_context(features)  # (B, S, H)
        anchored = F.pad(position_mask[:, :-1], (1, 0))
        if documents is not None:
            anchored = anchored & (documents.positions > 0)
        blocks = place_blocks(anchored, backbone.block_size, documents)
        proposals = input_ids.new_full((*position_mask.shape, count), -1)
        at_once = PROPOSE_BLOCKS_AT_ONCE * (1 if documents is None else len(documents.lengths))
        for start in range(0, blocks.count, at_once):
            part = blocks.select(start, start + at_once)
            states = backbone.compute_states(input_ids, context, part)[part.live]  # (n, size, H)
            row, block = part.live.nonzero().T
            anchors = part.anchors[row, block]
            together = BlockStates(states, input_ids[row, anchors], context[row, anchors - 1])
            decoded = [
                self.decode(piece, count, lambda logits: logits.argmax(-1))
                for piece in together.split(DECODE_BLOCKS_AT_ONCE)
            ]
            proposals[row, anchors - 1] = torch.cat(decoded)
        return proposals


class CastHead(NamedTuple):
    """A head (V, H) cast to another dtype, and the tensor that it was cast from."""

    of: Tensor
    head: Tensor


class DFlashSizes(NamedTuple):
    """Sizes of the draft; the others are the target's. `windows` has one entry per layer; `strategy` is named in errors."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    taps: int
    block_size: int
    mask_token_id: int
    windows: tuple[Window | None, ...]
    backend: str = "auto"
    strategy: str = "dflash"


class DFlashAttention(nn.Module):
    """Attention of block tokens to context and blocks; queries and keys are normed per head, as in Qwen3."""

    def __init__(self, target: TargetParts, sizes: DFlashSizes, generator: torch.Generator) -> None:
        super().__init__()
        width, self.head_dim = target.hidden_size, target.head_dim
        self.q_proj = seeded_linear(width, sizes.num_heads * self.head_dim, generator)
        self.k_proj = seeded_linear(width, sizes.num_kv_heads * self.head_dim, generator)
        self.v_proj = seeded_linear(width, sizes.num_kv_heads * self.head_dim, generator)
        self.o_proj = seeded_linear(sizes.num_heads * self.head_dim, width, generator)
        self.q_norm = RmsNorm(self.head_dim, target.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, target.rms_norm_eps)

    def project_query(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return rotated queries (B, heads, n, D) of states (B, n, H)."""
        return rotation.apply(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2))

    def project_key_value(self, x: Tensor, rotation: Rotation) -> KeyValue:
        """Return rotated keys, and values, (B, kv_heads, n, D) each, of states (B, n, H)."""
        key = rotation.apply(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2))
        return KeyValue(key, self._heads(self.v_proj(x)).transpose(1, 2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DFlashLayer(nn.Module):
    """A decoder layer in which block tokens attend to the context and to their own block; `window` is of the context."""

    def __init__(
        self, target: TargetParts, sizes: DFlashSizes, window: Window | None, generator: torch.Generator
    ) -> None:
        super().__init__()
        width, eps = target.hidden_size, target.rms_norm_eps
        self.self_attn = DFlashAttention(target, sizes, generator)
        self.mlp = GatedMlp(width, sizes.intermediate_size, generator)
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self._window = window

    def forward(
        self, hidden: Tensor, context: Tensor, at_context: Rotation, at_blocks: Rotation, attend: DraftAttention
    ) -> Tensor:
        """Return the blocks' states (B, A · size, H) after the layer, over the context (B, S, H)."""
        return self.forward_cached(hidden, self.self_attn.project_key_value(context, at_context), at_blocks, attend)

    def forward_cached(self, hidden: Tensor, context: KeyValue, at_blocks: Rotation, attend: DraftAttention) -> Tensor:
        """Return the same over a context whose keys and values were computed before."""
        hidden = hidden + self.attend(self.input_layernorm(hidden), context, at_blocks, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def attend(self, normed: Tensor, context: KeyValue, at_blocks: Rotation, attend: DraftAttention) -> Tensor:
        """Return what attention adds to the blocks' states, (B, A · size, H), from the normed states."""
        attention = self.self_attn
        query, own = attention.project_query(normed, at_blocks), attention.project_key_value(normed, at_blocks)
        attended = attend(query, context, own, self._window)  # (B, heads, A · size, D)
        return attention.o_proj(attended.transpose(1, 2).flatten(2))


MakeLayer = Callable[[TargetParts, DFlashSizes, Window | None, torch.Generator], DFlashLayer]
"""From the target, the sizes, the layer's window and the source of randomness to a layer of the draft."""


class DFlashDraft(BlockDraft):
    """The trainable draft. Embedding and head are the target's, as buffers outside the checkpoint.

    Args:
        generator: the only source of randomness of the initial weights.
        make_layer: makes the layers of a strategy that is built on DFlash and changes them.
    """

    embed_tokens: Tensor
    own_target_head: Tensor | None

    def __init__(
        self,
        target: TargetParts,
        sizes: DFlashSizes,
        generator: torch.Generator,
        make_layer: MakeLayer = DFlashLayer,
    ) -> None:
        super().__init__()
        width, eps = target.hidden_size, target.rms_norm_eps
        self.fc = seeded_linear(sizes.taps * width, width, generator)
        self.hidden_norm = RmsNorm(width, eps)
        self.layers = nn.ModuleList(make_layer(target, sizes, window, generator) for window in sizes.windows)
        self.norm = RmsNorm(width, eps)
        self.rotary = Rotary(target)
        self.block_size, self.mask_token_id = sizes.block_size, sizes.mask_token_id
        self._backend, self._strategy = sizes.backend, sizes.strategy
        self.register_buffer("embed_tokens", target.embedding, persistent=False)
        self._embedding_scale = target.embedding_scale
        self.register_buffer("own_target_head", None if target.tied else target.head, persistent=False)
        self._cast_head = CastHead(self.target_head_as_stored, self.target_head_as_stored)

    @property
    def target_head(self) -> Tensor:
        """The target's head (V, H) in the draft's dtype; if the files have another, it is cast once and kept."""
        stored, dtype = self.target_head_as_stored, self.fc.weight.dtype
        if self._cast_head.of is not stored or self._cast_head.head.dtype != dtype:
            self._cast_head = CastHead(stored, stored.to(dtype))
        return self._cast_head.head

    @property
    def target_head_as_stored(self) -> Tensor:
        """The target's head (V, H) in the dtype of its files."""
        return self.embed_tokens if self.own_target_head is None else self.own_target_head

    def fuse_context(self, features: Tensor) -> Tensor:
        """Return the context that all layers attend to: fused taps, (B, S, taps · H) to (B, S, H)."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def embed_blocks(self, known: Tensor) -> Tensor:
        """Return embedded blocks (B, A · size, H) from the anchors' tokens (B, A): the token, then mask tokens."""
        tokens = known.new_full((*known.shape, self.block_size), self.mask_token_id)
        tokens[..., 0] = known
        return self.embed(tokens.flatten(1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (…) to (…, H) as the target does, its scale included: servers use the target's own module."""
        embedded = F.embedding(tokens, self.embed_tokens).to(self.fc.weight.dtype)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def get_rotation(self, positions: Tensor, longest: int) -> Rotation:
        """Return the rotation at every position (B, n), all below `longest`."""
        return self.rotary(longest, self.fc.weight.dtype).at(positions[:, None])

    def compute_states(self, input_ids: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """Return the states of all blocks after the last layer, not normed: (B, A, size, H)."""
        length = context.shape[1]
        table = self.rotary(length + self.block_size, context.dtype)
        documents = blocks.documents
        at_context = table.window(0, length) if documents is None else table.at(documents.positions)
        at_blocks = table.at(blocks.positions[:, None])
        hidden = self.embed_blocks(input_ids.gather(1, blocks.anchors))  # (B, A · size, H)
        attend = DraftAttention(blocks.make_seen_keys(length), self._backend, self._strategy)
        for layer in self.layers:
            hidden = layer(hidden, context, at_context, at_blocks, attend)
        return hidden.unflatten(1, (-1, self.block_size))  # (B, A, size, H)

    @property
    def backbone(self) -> DFlashDraft:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    def compute_loss(self, blocks: TaughtBlocks, settings: LossSettings) -> LossSums:
        return block_cross_entropy(blocks, self.target_head, settings)

    @torch.no_grad()
    def decode(self, blocks: BlockStates, count: int, choose: ChooseTokens) -> Tensor:
        logits = F.linear(self.norm(blocks.states[:, 1 : 1 + count]), self.target_head)
        return torch.stack([choose(place) for place in logits.unbind(1)], dim=1)
