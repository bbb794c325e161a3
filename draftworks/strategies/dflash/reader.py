"""The DFlash block from the weights of an exported draft: all of its rows at once, from one pass over the context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import attend, gated_mlp, rms_norm, rotate, split_heads
from draftworks.export.readers.reader import ExportReader, Features
from draftworks.export.readers.sizes import LayerSizes
from draftworks.export.readers.vocabulary import DraftVocabulary
from draftworks.storage.identity import LayerTap


class Mask(Protocol):
    """What a layer lets a block see."""

    def visible(self, context: int, block: int) -> Tensor:
        """(block, context + block) bool: which of the context's rows, then of the block's own."""


@dataclass(frozen=True)
class FullMask:
    """The whole context, and the block in both directions."""

    def visible(self, context: int, block: int) -> Tensor:
        return torch.ones(block, context + block, dtype=torch.bool)


@dataclass(frozen=True)
class DFlashReader(ExportReader):
    """Context rows 0 … n-1, then the block [anchor, MASK, …] at positions n, n+1, …; row i+1 of it is proposal i.

    The context is normed once, after `fc`, and read by every layer as it is; the block is normed by each layer's
    `input_layernorm`. Keys of both pass `k_norm` and are then rotated.
    """

    taps: tuple[LayerTap, ...]
    sizes: LayerSizes
    masks: tuple[Mask, ...]
    """Of every layer."""
    block_size: int
    mask_token: int
    vocabulary: DraftVocabulary
    weights: dict[str, Tensor] = field(repr=False)
    embedding: Tensor = field(repr=False)
    head: Tensor = field(repr=False)
    dtype: torch.dtype

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        if len(drawn) >= self.block_size:
            raise ValueError(
                f"a block of {self.block_size} has {self.block_size - 1} proposals, asked for {len(drawn)}"
            )
        return self.rows(features, next_tokens)[1 : 1 + len(drawn)] @ self.head.T

    @torch.no_grad()
    def rows(self, features: Features, next_tokens: Tensor) -> Tensor:
        """All rows of the block as the head reads them, (block, H)."""
        context = self._norm(self.joined(features) @ self.weights["fc.weight"].T, "hidden_norm")
        tokens = torch.full((self.block_size,), self.mask_token)
        tokens[0] = next_tokens[-1]
        block = self.embedding[tokens].to(self.dtype)
        for layer, mask in enumerate(self.masks):
            block = self._layer(block, context, f"layers.{layer}.", mask.visible(len(context), self.block_size))
        return self._norm(block, "norm")

    def _layer(self, block: Tensor, context: Tensor, layer: str, visible: Tensor) -> Tensor:
        own = self._norm(block, f"{layer}input_layernorm")
        read = torch.cat([context, own])
        positions = torch.arange(len(read))
        query = self._rotated(own, f"{layer}self_attn.q_", positions[len(context) :])
        key = self._rotated(read, f"{layer}self_attn.k_", positions)
        value = split_heads(read @ self.weights[f"{layer}self_attn.v_proj.weight"].T, self.sizes.head_dim)
        attended = attend(query, key, value, visible)
        block = block + attended @ self.weights[f"{layer}self_attn.o_proj.weight"].T
        after = self._norm(block, f"{layer}post_attention_layernorm")
        return block + gated_mlp(after, self.weights, f"{layer}mlp.")

    def _rotated(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """Queries or keys: projected, normed per head, turned by their positions."""
        heads = split_heads(x @ self.weights[f"{name}proj.weight"].T, self.sizes.head_dim)
        return rotate(self._norm(heads, f"{name}norm"), positions, self.sizes.rope)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.sizes.eps)
