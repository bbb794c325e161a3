"""The DFlash block from the weights of an exported draft: all of its rows at once, from one pass over the context.

DFlash from exported files: the layout of z-lab and SGLang, and that of speculators.

The tensors are the same (speculators adds a head and d2t, t2d for a reduced vocabulary); what a sliding window shows is not:

* z-lab, SGLang, vLLM: row j of a block (at position n+j) sees positions n+j-w+1 … n+j, so the window includes the row
  itself and moves on with it.
* speculators 0.9.0, when it trains: every row of the block sees the w positions before the anchor, n-w … n-1, and all rows
  of the block up to itself.

So a draft with windows cannot be right in the library and in vLLM at once. Without windows all four agree: the whole context
before the anchor (not the anchor's own stream, which no server has yet), and the block in both directions.

`sliding_window_non_causal` is a trap even for drafts without windows: vLLM (since #47745; #56692 would mend it) takes
false, the library's default, as "all layers are causal inside the block", full attention included. Such a file must
say true, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import attend, gated_mlp, rms_norm, rotate, split_heads
from draftworks.export.readers.files import (
    DraftVocabulary,
    Expected,
    ExportFolder,
    check_speculators_header,
    read_vocabulary,
    speculative_tokens,
    vocabulary_tensors,
)
from draftworks.export.readers.reader import ExportReader, Features, TargetTensors, check_target, read_taps
from draftworks.export.readers.sizes import LayerSizes, named_weights
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


@dataclass(frozen=True)
class MovingWindow:
    """z-lab, SGLang, vLLM: `window` positions up to and with the row itself."""

    window: int

    def visible(self, context: int, block: int) -> Tensor:
        back = context + torch.arange(block)[:, None] - torch.arange(context + block)
        return (back >= 0) & (back < self.window)


@dataclass(frozen=True)
class AnchoredWindow:
    """speculators 0.9.0: `window` positions before the anchor for the whole block, and the block itself."""

    window: int
    causal: bool

    def visible(self, context: int, block: int) -> Tensor:
        position = torch.arange(context + block)
        row = context + torch.arange(block)[:, None]
        own = (position >= context) & ((position <= row) | (not self.causal))
        return own | ((position >= context - self.window) & (position < context))


@dataclass(frozen=True)
class DFlashLayout:
    """Where a format keeps things, and by what it knows its drafts.

    Attributes:
        section: prefix of the layers' config keys.
        layer_ids, mask_token: keys of the taps and the mask token.
        class_name: in z-lab's layout.
        algorithm: in speculators' layout.
        from_anchor: the anchor's own row proposes too.
    """

    export_format: str
    section: str
    layer_ids: str
    mask_token: str
    class_name: str = "DFlashDraftModel"
    algorithm: str = "dflash"
    from_anchor: bool = False


ZLAB = DFlashLayout(
    export_format="zlab_dflash",
    section="",
    layer_ids="dflash_config.target_layer_ids",
    mask_token="dflash_config.mask_token_id",
)
SPECULATORS = DFlashLayout(
    export_format="speculators_dflash",
    section="transformer_layer_config.",
    layer_ids="aux_hidden_state_layer_ids",
    mask_token="mask_token_id",
)


def read_zlab_dflash(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlashReader:
    """A draft as z-lab's own code and SGLang load it.

    Raises:
        StoreError: files that one of the two would load as another draft than the one that was trained.
    """
    return read_zlab(folder, target, dtype)


def read_zlab(
    folder: ExportFolder,
    target: TargetTensors,
    dtype: torch.dtype,
    layout: DFlashLayout = ZLAB,
    projector: Mapping[str, Expected] | None = None,
) -> DFlashReader:
    """The DFlash part of a draft in z-lab's layout; its file holds the tensors of a `projector` too, where there is one."""
    folder.must_be("architectures", [layout.class_name])
    folder.must_be("model_type", "qwen3")
    folder.must_not_differ("is_causal", None)
    folder.must_not_differ("dflash_config.causal", None)
    return _read(folder, layout, MovingWindow, None, target, dtype, projector)


def read_speculators_dflash(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlashReader:
    """A draft as speculators 0.9.0 and vLLM load it, with the library's windows.

    Raises:
        StoreError: files that one of the two would load as another draft than the one that was trained.
    """
    return read_speculators(folder, target, dtype)


def read_speculators(
    folder: ExportFolder,
    target: TargetTensors,
    dtype: torch.dtype,
    layout: DFlashLayout = SPECULATORS,
    heads: Mapping[str, Expected] | None = None,
) -> DFlashReader:
    """The DFlash part of a draft in speculators' layout; its file holds the tensors of `heads` too, where there are any."""
    check_speculators_header(folder, layout.algorithm)
    folder.must_be("transformer_layer_config.model_type", "qwen3")
    folder.must_not_differ("target_hidden_size", folder.setting("transformer_layer_config.hidden_size", int))
    folder.must_not_differ("sample_from_anchor", layout.from_anchor)
    if speculative_tokens(folder) != folder.setting("block_size", int) - (not layout.from_anchor):
        expected = "block_size" if layout.from_anchor else "block_size - 1"
        folder.refuse("speculators_config.proposal_methods", f"{expected} speculative_tokens", "another number")
    causal = not folder.optional("sliding_window_non_causal", bool, False)
    full = not all(_slides(folder, layout))
    if full and folder.has("sliding_window_non_causal") and causal:
        folder.refuse("sliding_window_non_causal", "true: vLLM makes full attention causal by it (#56692)", "false")
    says = folder.setting("draft_vocab_size", int)
    return _read(folder, layout, lambda window: AnchoredWindow(window, causal), says, target, dtype, heads)


def _slides(folder: ExportFolder, layout: DFlashLayout) -> list[bool]:
    """Of every layer, whether it has the sliding window."""
    layers = folder.setting(f"{layout.section}num_hidden_layers", int)
    types = folder.optional(f"{layout.section}layer_types", list, ["full_attention"] * layers)
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        folder.refuse(f"{layout.section}layer_types", f"{layers} times full_attention or sliding_attention", str(types))
    if "sliding_attention" in types:
        # Qwen3's config class forgets the window where this is not set.
        folder.must_be(f"{layout.section}use_sliding_window", True)
    return [kind == "sliding_attention" for kind in types]


def _masks(folder: ExportFolder, layout: DFlashLayout, window: Callable[[int], Mask]) -> tuple[Mask, ...]:
    slides = _slides(folder, layout)
    sliding = window(folder.setting(f"{layout.section}sliding_window", int)) if any(slides) else FullMask()
    return tuple(sliding if slide else FullMask() for slide in slides)


def _read(
    folder: ExportFolder,
    layout: DFlashLayout,
    window: Callable[[int], Mask],
    says: int | None,
    target: TargetTensors,
    dtype: torch.dtype,
    more: Mapping[str, Expected] | None = None,
) -> DFlashReader:
    """`says`: how many tokens a head of the draft's own predicts; None in formats without one. `more` are other tensors
    that the file holds."""
    sizes = LayerSizes.read(folder, layout.section)
    check_target(folder, sizes, target)
    own_head = None if says == sizes.vocab else says
    taps = read_taps(folder, layout.export_format, layout.layer_ids)
    folder.check_tensors(_tensors(sizes, len(taps), own_head) | (more or {}))
    weights = {name: tensor.to(dtype) for name, tensor in folder.tensors.items() if tensor.is_floating_point()}
    return DFlashReader(
        taps=taps,
        sizes=sizes,
        masks=_masks(folder, layout, window),
        block_size=_within(folder, "block_size", 2, 1024),
        mask_token=_within(folder, layout.mask_token, 0, sizes.vocab - 1),
        vocabulary=read_vocabulary(folder, sizes.vocab),
        weights=weights,
        embedding=target.embedding.to(dtype) * target.embedding_scale,
        head=weights.get("lm_head.weight", target.head.to(dtype)),
        dtype=dtype,
    )


def _tensors(sizes: LayerSizes, taps: int, own_head: int | None) -> dict[str, Expected]:
    """What the file must hold."""
    shapes = {"fc": (sizes.hidden, taps * sizes.hidden), "hidden_norm": (sizes.hidden,), "norm": (sizes.hidden,)}
    if own_head is not None:
        shapes["lm_head"] = (own_head, sizes.hidden)
    expected = named_weights(shapes)
    for layer in range(sizes.layers):
        per_head = {f"self_attn.{name}_norm": (sizes.head_dim,) for name in "qk"}
        expected |= named_weights(per_head, f"layers.{layer}.")
        expected |= sizes.list_layer_tensors(f"layers.{layer}.", inputs=sizes.hidden)
    return expected if own_head is None else expected | vocabulary_tensors(own_head, sizes.vocab)


def _within(folder: ExportFolder, key: str, lowest: int, highest: int) -> int:
    value = folder.setting(key, int)
    if not lowest <= value <= highest:
        folder.refuse(key, f"{lowest} to {highest}", str(value))
    return value
