"""DFlash's options, its taps, its checks against a target, and its registration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from draftworks.config.draft_options import LayerOptions, check_mask_token, parse_taps, spread_taps
from draftworks.config.strategies import (
    ExportSpec,
    FitDefault,
    MetricSums,
    StrategySpec,
    TargetSizes,
    allow_packing,
    register_strategy,
)
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap

if TYPE_CHECKING:
    import torch

OTHER_WINDOW = (
    "speculators counts a window from the anchor for the whole block (sliding_window_kind anchor), not from each token"
)


class DFlashOptions(LayerOptions):
    """DFlash (arXiv 2602.06036): a whole block of tokens proposed in one pass, over several fused taps of the target."""

    strategy: ClassVar[str] = "dflash"
    """Name of the strategy, for errors."""
    structural = (*LayerOptions.structural, "block_size", "sliding_window", "sliding_layers", "sliding_window_kind")
    execution = ("attention", "objective_chunk_blocks")
    added = (*LayerOptions.added, "sliding_window_kind")

    block_size: int = Field(
        default=16, ge=2, le=64, description="Tokens of a block: the last known one, then the proposals."
    )
    num_anchors: int = Field(default=512, ge=1, description="Blocks trained on per sample, drawn at every step.")
    num_layers: int = Field(default=5, ge=1, description="Decoder layers of the draft.")
    num_taps: int = Field(
        default=5,
        ge=1,
        description="Layers of the target to fuse, spread evenly, by default at most all but its last; layer_ids names them "
        "instead.",
    )
    layer_ids: list[int] | None = Field(default=None, min_length=1, description="Taps as hf_index, ascending.")
    mask_token_id: int | None = Field(
        default=None,
        ge=0,
        description="Token at the places to be proposed: one that no text has. Default the last id.",
    )
    gamma: float | None = Field(
        default=None,
        gt=0,
        description="Weight of label k of a block is exp(-(k - 1) / gamma); default all equal. Recipes take 7.",
    )
    weighting: Literal["uniform", "dpace", "dpace_cumulative_confidence", "dpace_continuation_value"] = Field(
        default="uniform",
        description="D-PACE weights a label by the probability that a server reaches it, and by the labels after it.",
    )
    dpace_alpha: float = Field(
        default=0.5, ge=0, le=1, description="Smooths the confidences of D-PACE; 1 ignores them."
    )
    loss: Literal["token_mean", "specforge"] = Field(
        default="token_mean",
        description="Labels up to the end of an answer, per label; or the reference's rule and normalisation.",
    )
    sliding_window: int | None = Field(
        default=None, gt=1, description="Window of the draft's attention, in tokens; default none."
    )
    sliding_layers: list[int] | None = Field(
        default=None, description="Draft layers with the window; default all, where there is one."
    )
    sliding_window_kind: Literal["token", "anchor", "anchor_both_ways"] = Field(
        default="token",
        description="The window ends at each token of a block, as z-lab and servers have it, or at its anchor, as speculators "
        "trains; tokens then see the block up to themselves, or all of it.",
    )
    attention: Literal["auto", "eager", "sdpa", "flex"] = Field(
        default="auto", description="Back end of attention, equal to rounding: auto is flex on a GPU, else sdpa."
    )
    objective_chunk_blocks: int | None = Field(
        default=None, ge=1, description="Blocks whose logits are held at a time; by default 32, and 128 on a GPU."
    )

    def choose_chunk_blocks(self, device: torch.device) -> int:
        """Return how many blocks have logits at a time: a GPU wants large products, a CPU what its cache holds."""
        return self.objective_chunk_blocks or (32 if device.type == "cpu" else 128)

    @model_validator(mode="after")
    def _window_fits(self) -> DFlashOptions:
        if self.sliding_window is None and self.sliding_window_kind != "token":
            raise ValueError(f"sliding_window_kind {self.sliding_window_kind}, but sliding_window is not set")
        if self.sliding_layers is not None:
            if self.sliding_window is None:
                raise ValueError("sliding_layers names layers with a window, but sliding_window is not set")
            outside = [k for k in self.sliding_layers if not 0 <= k < self.num_layers]
            if outside:
                raise ValueError(f"sliding_layers {outside} outside 0..{self.num_layers - 1}, the layers of the draft")
        if self.weighting != "uniform" and self.gamma is not None:
            raise ValueError(f"weighting {self.weighting} and gamma both weigh the labels of a block: set one of them")
        return self

    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window of every draft layer; None is full attention."""
        sliding = range(self.num_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if layer in sliding else None for layer in range(self.num_layers))


def choose_dflash_taps(num_layers: int, options: DFlashOptions) -> tuple[LayerTap, ...]:
    """Return taps spread evenly from after the second layer to after the third last, as in z-lab's drafts.

    In a target with fewer layers between these they are spread over all of them.

    Raises:
        ConfigError: a tap is not inside the target, or taps collide.
    """
    count = options.num_taps if options.layer_ids is None else len(options.layer_ids)
    if count == 1:
        default = [num_layers // 2 + 1]
    else:
        default = [1 + round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    if count <= max(num_layers - 1, 1) and not _are_taps(default, num_layers):
        default = spread_taps(count, num_layers)
    return parse_taps(options.strategy, options.layer_ids, default, num_layers, count)


def _are_taps(ids: list[int], num_layers: int) -> bool:
    return sorted(set(ids)) == ids and ids[0] >= 0 and ids[-1] < num_layers


def _fit_num_taps(default: int, given: Mapping[str, Any], target: TargetSizes) -> int:
    """Return as many taps as there are outputs of layers before the last; what an entry's layer_ids replace stays."""
    if given.get("layer_ids") is not None:
        return default
    return max(1, min(default, target.num_layers - 1))


FITTED: dict[str, FitDefault] = {
    "block_size": lambda default, given, target: max(2, min(default, target.max_length - 1)),
    "num_taps": _fit_num_taps,
}
"""Defaults that a small target lowers: a block is shorter than a sample, and a tap is the output of a layer but the last."""


def check_dflash(options: DFlashOptions, target: TargetSizes) -> None:
    """Raise ConfigError for a mask token that the target does not have, or a block longer than any sample."""
    if options.block_size >= target.max_length:
        raise ConfigError(
            f"{options.strategy}: block_size {options.block_size} does not fit into samples of at most {target.max_length} tokens: "
            "lower it, or raise max_length"
        )
    check_mask_token(options.strategy, options.mask_token_id, target.vocab_size)


def refuse_windows(options: DFlashOptions, taps: tuple[LayerTap, ...]) -> str | None:
    """Return why speculators' format cannot hold such a draft; None if it can."""
    if options.sliding_window is not None and options.sliding_window_kind == "token":
        return f"sliding_window: {OTHER_WINDOW}"
    return None


def refuse_anchored_windows(options: DFlashOptions, taps: tuple[LayerTap, ...]) -> str | None:
    """Return why z-lab's format cannot hold such a draft; None if it can."""
    if options.sliding_window_kind != "token":
        return (
            f"sliding_window_kind {options.sliding_window_kind}: z-lab's code and SGLang count a window from each token"
        )
    return None


def refuse_partial_windows(options: DFlashOptions, taps: tuple[LayerTap, ...]) -> str | None:
    """Return why llama.cpp's format cannot hold such a draft; None if it can."""
    if options.sliding_window_kind != "token":
        return f"sliding_window_kind {options.sliding_window_kind}: llama.cpp counts a window from each token"
    if len(set(options.layer_windows())) > 1:
        return "sliding_layers: in llama.cpp the whole draft is causal inside a block, as layers with a window are, or none of it is"
    return None


def _list_metric_sums(options: DFlashOptions) -> MetricSums:
    return MetricSums(options.block_size - 1)


DFLASH = register_strategy(
    StrategySpec(
        name="dflash",
        description="DFlash: a block of tokens proposed in one pass of a few layers over fused layers of the target.",
        options=DFlashOptions,
        taps=choose_dflash_taps,
        factory="draftworks.strategies.dflash.strategy:DFlashStrategy",
        uses_last_hidden=False,
        fitted=FITTED,
        check=check_dflash,
        packing_refusal=allow_packing,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="zlab_dflash",
                description="z-lab's own code, SGLang with DFlash, and vLLM.",
                factory="draftworks.strategies.dflash.export:ZlabDFlash",
                reader="draftworks.strategies.dflash.reader:read_zlab_dflash",
                counting="layer_output",
                refuses=refuse_anchored_windows,
            ),
            ExportSpec(
                name="speculators_dflash",
                description="speculators 0.9.0 and vLLM with DFlash; windows from the anchor only.",
                factory="draftworks.strategies.dflash.export:SpeculatorsDFlash",
                reader="draftworks.strategies.dflash.reader:read_speculators_dflash",
                counting="layers_passed",
                refuses=refuse_windows,
                uses_unscaled_embeddings=True,
            ),
            ExportSpec(
                name="gguf_dflash",
                description="llama.cpp's server: a GGUF file. Not with a rope scaled as Llama 3.1's.",
                factory="draftworks.strategies.dflash.export_gguf:GgufDFlash",
                reader="draftworks.strategies.dflash.reader_gguf:read_gguf_dflash",
                counting="layers_passed",
                refuses=refuse_partial_windows,
                on_request=True,
            ),
        ),
    )
)
