"""DFlash from exported files: the layout of z-lab and SGLang, and that of speculators.

The tensors are the same (speculators adds a head and d2t, t2d for a reduced vocabulary); what a sliding window shows is not:

* z-lab, SGLang, vLLM: row j of a block (at position n+j) sees positions n+j-w+1 … n+j, so the window includes the row
  itself and moves on with it.
* speculators 0.9.0, when it trains: every row of the block sees the w positions before the anchor, n-w … n-1, and all rows
  of the block up to itself.

So a draft with windows cannot be the same in the library and in vLLM. Without windows all four agree: the whole context
before the anchor (not the anchor's own stream, which no server has yet), and the block in both directions.

`sliding_window_non_causal` is a trap even for drafts without windows: vLLM (since #47745; #56692 would mend it) takes
false, the library's default, as "all layers are causal inside the block", full attention included. The reader computes that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import LayerSizes, attend, gated_mlp, rms_norm, rotate, split_heads
from draftworks.export.readers.reader import (
    DraftVocabulary,
    ExportFolder,
    ExportReader,
    Features,
    TargetTensors,
    read_taps,
    read_vocabulary,
)
from draftworks.storage.identity import LayerTap

Mask = Callable[[int, int], Tensor]
"""From the lengths of the context and of the block to which positions each row of the block sees: (block, context + block) bool."""


def moving_mask(context: int, block: int, window: int) -> Tensor:
    """z-lab, SGLang, vLLM: `window` positions up to and including the row itself."""
    behind = context + torch.arange(block)[:, None] - torch.arange(context + block)
    return (behind >= 0) & (behind < window)


def anchored_mask(context: int, block: int, window: int | None = None, causal: bool = False) -> Tensor:
    """speculators 0.9.0: `window` positions before the anchor, or all of them, and the block, of which a `causal` row sees
    only the part up to itself."""
    position = torch.arange(context + block)
    row = context + torch.arange(block)[:, None]
    in_block = (position >= context) & ((position <= row) | (not causal))
    in_context = (position < context) & (position >= context - (context if window is None else window))
    return in_block | in_context


Sublayer = Callable[[Tensor], Tensor]
"""From the normed rows of a block (block, H) to what attention, or the MLP, makes of them, (block, H)."""


@dataclass(frozen=True)
class DFlashReader(ExportReader):
    """Context at positions 0 … n-1, then the block [anchor, MASK, …] at positions n, n+1, …

    The context is normed once, after `fc`, and read by every layer as it is; the block is normed by each layer's
    `input_layernorm`. Keys of both pass `k_norm` and are then rotated.

    Attributes:
        masks: of every layer.
        first_row: row of the block that proposes first: 1, or 0 where the anchor's own row proposes too.
    """

    taps: tuple[LayerTap, ...]
    sizes: LayerSizes
    masks: tuple[Mask, ...]
    block_size: int
    mask_token: int
    first_row: int
    vocabulary: DraftVocabulary
    weights: dict[str, Tensor] = field(repr=False)
    embedding: Tensor = field(repr=False)
    head: Tensor = field(repr=False)
    dtype: torch.dtype

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        return self.proposing_rows(features, next_tokens, len(drawn)) @ self.head.T

    def proposing_rows(self, features: Features, next_tokens: Tensor, count: int) -> Tensor:
        """Return the states of `count` proposals as the head reads them, (count, H).

        Raises:
            ValueError: a block has fewer proposals.
        """
        rows = self.rows(features, next_tokens)[self.first_row :]
        if count > len(rows):
            raise ValueError(f"a block of {self.block_size} has {len(rows)} proposals, asked for {count}")
        return rows[:count]

    def rows(self, features: Features, next_tokens: Tensor) -> Tensor:
        """Return all rows of the block as the head reads them, (block, H)."""
        context = self.fuse_context(features)
        tokens = torch.full((self.block_size,), self.mask_token)
        tokens[0] = next_tokens[-1]
        block = self.embedding[tokens].to(self.dtype)  # (block, H)
        for layer, mask in enumerate(self.masks):
            block = self._run_layer(block, context, f"layers.{layer}.", mask(len(context), self.block_size))
        return self._norm(block, "norm")

    def fuse_context(self, features: Features) -> Tensor:
        """Return what the layers read of the target, (n, H)."""
        return self._norm(self.join_taps(features) @ self.weights["fc.weight"].T, "hidden_norm")

    def _run_layer(self, block: Tensor, context: Tensor, layer: str, visible: Tensor) -> Tensor:
        def attention(own: Tensor) -> Tensor:
            read = torch.cat([context, own])  # (n + block, H)
            positions = torch.arange(len(read))
            query = self._project_rotated(own, f"{layer}self_attn.q_", positions[len(context) :])
            key = self._project_rotated(read, f"{layer}self_attn.k_", positions)
            value = split_heads(read @ self.weights[f"{layer}self_attn.v_proj.weight"].T, self.sizes.head_dim)
            return attend(query, key, value, visible) @ self.weights[f"{layer}self_attn.o_proj.weight"].T

        def mlp(own: Tensor) -> Tensor:
            return gated_mlp(own, self.weights, f"{layer}mlp.")

        own = self._norm(block, f"{layer}input_layernorm")
        block = block + self.run_sublayer(f"{layer}self_attn", own, attention)
        after = self._norm(block, f"{layer}post_attention_layernorm")
        return block + self.run_sublayer(f"{layer}mlp", after, mlp)

    def run_sublayer(self, name: str, own: Tensor, sublayer: Sublayer) -> Tensor:
        """Return what a sublayer adds to the block, (block, H); readers of strategies built on DFlash may change it."""
        return sublayer(own)

    def _project_rotated(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """Return queries or keys, (heads, n, D): projected, normed per head, rotated by their positions."""
        heads = split_heads(x @ self.weights[f"{name}proj.weight"].T, self.sizes.head_dim)
        return rotate(self._norm(heads, f"{name}norm"), positions, self.sizes.rope)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.sizes.eps)


@dataclass(frozen=True)
class HeadReader(ExportReader):
    """A head over the rows of a DFlash block, whose reader holds the head's weights too."""

    backbone: DFlashReader = field(repr=False)

    @property
    def taps(self) -> tuple[LayerTap, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.backbone.taps

    @property
    def vocabulary(self) -> DraftVocabulary:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.backbone.vocabulary

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.backbone.dtype


def read_zlab_dflash(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlashReader:
    """Read a draft as z-lab's own code and SGLang do."""
    return read_zlab(folder, target, dtype, "zlab_dflash", first_row=1)


def read_zlab(
    folder: ExportFolder, target: TargetTensors, dtype: torch.dtype, export_format: str, first_row: int
) -> DFlashReader:
    """Read the DFlash part of a draft in z-lab's layout."""
    masks = tuple(
        anchored_mask if window is None else partial(moving_mask, window=window) for window in _windows(folder, "")
    )
    taps = read_taps(folder, export_format, "dflash_config.target_layer_ids")
    mask_token = folder.require_setting("dflash_config.mask_token_id")
    return _read(folder, target, dtype, "", taps, masks, mask_token, first_row)


def read_speculators_dflash(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlashReader:
    """Read a draft as speculators 0.9.0 and vLLM do, with the library's windows."""
    return read_speculators(folder, target, dtype, "speculators_dflash", from_anchor=False)


def read_speculators(
    folder: ExportFolder,
    target: TargetTensors,
    dtype: torch.dtype,
    export_format: str,
    from_anchor: bool,
    both_ways: bool = False,
) -> DFlashReader:
    """Read the DFlash part of a draft in speculators' layout.

    Args:
        from_anchor, both_ways: the library's defaults of `sample_from_anchor` and `sliding_window_non_causal`.
    """
    section, trap = "transformer_layer_config.", "sliding_window_non_causal"
    masks = tuple(
        partial(anchored_mask, causal=not folder.find_setting(trap, both_ways or window is None), window=window)
        for window in _windows(folder, section)
    )
    taps = read_taps(folder, export_format, "aux_hidden_state_layer_ids")
    first_row = 0 if folder.find_setting("sample_from_anchor", from_anchor) else 1
    return _read(folder, target, dtype, section, taps, masks, folder.require_setting("mask_token_id"), first_row)


def _windows(folder: ExportFolder, section: str) -> list[int | None]:
    """Return the sliding window of every layer. Qwen3's config class forgets it where `use_sliding_window` is not set."""
    types = folder.find_setting(
        f"{section}layer_types", ["full_attention"] * folder.require_setting(f"{section}num_hidden_layers")
    )
    window = (
        folder.find_setting(f"{section}sliding_window") if folder.find_setting(f"{section}use_sliding_window") else None
    )
    return [window if kind == "sliding_attention" else None for kind in types]


def _read(
    folder: ExportFolder,
    target: TargetTensors,
    dtype: torch.dtype,
    section: str,
    taps: tuple[LayerTap, ...],
    masks: tuple[Mask, ...],
    mask_token: int,
    first_row: int,
) -> DFlashReader:
    """Read the files; `section` is the prefix of the layers' config keys."""
    weights = folder.cast_weights(dtype)
    return DFlashReader(
        taps=taps,
        sizes=LayerSizes.read(folder, section),
        masks=masks,
        block_size=folder.require_setting("block_size"),
        mask_token=mask_token,
        first_row=first_row,
        vocabulary=read_vocabulary(folder, len(target.embedding)),
        weights=weights,
        embedding=target.embedding.to(dtype) * target.embedding_scale,
        head=weights.get("lm_head.weight", target.head.to(dtype)),
        dtype=dtype,
    )
