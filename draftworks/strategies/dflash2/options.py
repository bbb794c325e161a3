"""DFlash 2's options, its checks against a target, and its registration."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field, model_validator

from draftworks.config.strategies import (
    ExportSpec,
    MetricSums,
    StrategySpec,
    TargetSizes,
    allow_packing,
    register_strategy,
)
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap
from draftworks.strategies.dflash.options import (
    FITTED,
    DFlashOptions,
    check_dflash,
    choose_dflash_taps,
    refuse_anchored_windows,
    refuse_partial_windows,
    refuse_windows,
)


class DFlash2Options(DFlashOptions):
    """DFlash 2: DFlash with convolutions inside the block, and a choice among the likeliest tokens of each place (z-lab)."""

    strategy: ClassVar[str] = "dflash2"
    structural = (
        *DFlashOptions.structural,
        *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    )

    block_size: int = Field(
        default=8, ge=2, le=64, description="Tokens of a block: the last known one, then the proposals."
    )
    conv_kernel_size: int = Field(
        default=2, ge=1, description="Taps of a convolution: a token of the block and those just before it."
    )
    conv_group_size: int = Field(
        default=16, ge=1, description="Neighbouring channels with the same dynamic kernel; divides hidden_size."
    )
    selector_rank: int = Field(default=256, ge=1, description="Width of the selector's three factors.")
    selector_top_k: int = Field(
        default=16, ge=1, description="Likeliest tokens of a place among which the selector chooses."
    )
    selector_loss_alpha: float = Field(
        default=1.0, gt=0, description="Weight of the selector's cross-entropy beside DFlash's loss."
    )

    @model_validator(mode="after")
    def _kernel_fits(self) -> DFlash2Options:
        check_kernel(self.conv_kernel_size, self.block_size)
        return self


def check_kernel(kernel_size: int, block_size: int) -> None:
    """Raise ValueError for a convolution with more taps than a block has tokens."""
    if kernel_size > block_size:
        raise ValueError(
            f"conv_kernel_size {kernel_size} is more than block_size {block_size}: convolutions do not leave the block"
        )


def check_groups(strategy: str, group_size: int, hidden_size: int) -> None:
    """Raise ConfigError for a target whose channels are not whole groups."""
    if hidden_size % group_size:
        raise ConfigError(
            f"{strategy}: conv_group_size {group_size} does not divide the target's hidden_size {hidden_size}. Set "
            "options.conv_group_size to one of its divisors"
        )


def check_dflash2(options: DFlash2Options, target: TargetSizes) -> None:
    """Raise ConfigError for what DFlash refuses, channels that are not whole groups, or more candidates than tokens."""
    check_dflash(options, target)
    check_groups(options.strategy, options.conv_group_size, target.hidden_size)
    if options.selector_top_k > target.vocab_size:
        raise ConfigError(
            f"dflash2: selector_top_k {options.selector_top_k} is more than the {target.vocab_size} tokens of the target's "
            "vocabulary: lower it"
        )


def _speculators_refuses(options: DFlash2Options, taps: tuple[LayerTap, ...]) -> str | None:
    """Return why its format cannot hold such a draft; None if it can. There `sliding_window_non_causal: false` has to be said."""
    if options.sliding_window_kind == "anchor" and None in options.layer_windows():
        return "sliding_window_kind anchor in some of the layers: vLLM would take the block as causal in the others too"
    return refuse_windows(options, taps)


def _list_metric_sums(options: DFlash2Options) -> MetricSums:
    return MetricSums(options.block_size - 1, ("loss", "selector_loss", "recall"), ("accept_len", "base_accept_len"))


DFLASH2 = register_strategy(
    StrategySpec(
        name=DFlash2Options.strategy,
        description="DFlash 2: a block of DFlash with local convolutions, its tokens chosen one after another among candidates.",
        options=DFlash2Options,
        taps=choose_dflash_taps,
        factory="draftworks.strategies.dflash2.strategy:DFlash2Strategy",
        uses_last_hidden=False,
        fitted={
            **FITTED,
            "conv_group_size": lambda default, given, target: math.gcd(default, target.hidden_size),
            "selector_top_k": lambda default, given, target: min(default, target.vocab_size),
        },
        check=check_dflash2,
        packing_refusal=allow_packing,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="zlab_dflash2",
                description="z-lab's own code, SGLang 0.5.23 and vLLM from 0.32 on: z-lab's layout of DFlash with both additions.",
                factory="draftworks.strategies.dflash2.export:ZlabDFlash2",
                reader="draftworks.strategies.dflash2.reader:read_zlab_dflash2",
                counting="layer_output",
                refuses=refuse_anchored_windows,
            ),
            ExportSpec(
                name="speculators_dflash2",
                description="speculators 0.9.0 and vLLM from 0.32 on; windows from the anchor only.",
                factory="draftworks.strategies.dflash2.export:SpeculatorsDFlash2",
                reader="draftworks.strategies.dflash2.reader:read_speculators_dflash2",
                counting="layers_passed",
                refuses=_speculators_refuses,
                uses_unscaled_embeddings=True,
            ),
            ExportSpec(
                name="gguf_dflash2",
                description="llama.cpp's server: a GGUF file. Not with a rope scaled as Llama 3.1's.",
                factory="draftworks.strategies.dflash2.export_gguf:GgufDFlash2",
                reader="draftworks.strategies.dflash2.reader_gguf:read_gguf_dflash2",
                counting="layers_passed",
                refuses=refuse_partial_windows,
                on_request=True,
            ),
        ),
    )
)
