"""LiLiCorr's options and its registration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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
)
from draftworks.strategies.dflash2.options import check_groups, check_kernel

SERVED_CANDIDATES = (1, 2, 4, 8, 16)
WIDEST_DEFAULT = 1024
"""Width of the published heads, for a target of width 4096."""


class LiLiCorrOptions(DFlashOptions):
    """LiLiCorr (arXiv 2608.20530): a block of DFlash whose best candidates are reranked together by a small transformer."""

    strategy: ClassVar[str] = "lilicorr"
    structural = (
        *DFlashOptions.structural,
        *("candidate_topk", "lattice_size", "lattice_layers", "lattice_heads", "lattice_mlp_ratio"),
        *("factor_dim", "logit_scale", "vector_eps", "conv_kernel_size", "conv_group_size"),
    )
    added = (*DFlashOptions.added, "conv_kernel_size", "conv_group_size")

    candidate_topk: int = Field(
        default=8, ge=1, le=64, description="Candidates at each place of a block. Servers take 1, 2, 4, 8 or 16."
    )
    lattice_size: int | None = Field(
        default=None,
        ge=1,
        description="Width of the transformer over the candidates; default the target's, at most 1024.",
    )
    lattice_layers: int = Field(default=2, ge=1, description="Layers of that transformer.")
    lattice_heads: int = Field(default=8, ge=1, description="Its attention heads; they divide its width.")
    lattice_mlp_ratio: float = Field(default=2.0, gt=0, description="Width of its MLPs, as a multiple of its own.")
    factor_dim: int | None = Field(
        default=None,
        ge=1,
        description="Size of the vectors whose cosines are the scores; default the transformer's width.",
    )
    logit_scale: float = Field(default=8.0, gt=0, description="By what a cosine is multiplied to be a logit.")
    vector_eps: float = Field(default=1e-4, gt=0, lt=0.5, description="Least length of such a vector.")
    ce_weight: float = Field(default=0.25, ge=0, description="Weight of the cross-entropy over the candidates.")
    margin_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the hinge loss. The variant `margin` takes 0.125 here and for ce_weight.",
    )
    margin: float = Field(default=2.0, gt=0, description="Lead over the next candidate at which the hinge loss is 0.")
    penalty_weight: float = Field(
        default=0.25, ge=0, description="Weight of the expected gap of the target's logits to what would be chosen."
    )

    conv_kernel_size: int | None = Field(
        default=None, ge=1, description="Taps of the convolutions around each sublayer; DFlash 2 has 2. Default none."
    )
    conv_group_size: int | None = Field(
        default=None, ge=1, description="Neighbouring channels with the same dynamic kernel; DFlash 2 has 16."
    )

    @model_validator(mode="after")
    def _convolutions_are_whole(self) -> LiLiCorrOptions:
        if (self.conv_kernel_size is None) != (self.conv_group_size is None):
            raise ValueError("conv_kernel_size and conv_group_size: set both, or none for layers without convolutions")
        if self.conv_kernel_size is not None:
            check_kernel(self.conv_kernel_size, self.block_size)
        return self

    @model_validator(mode="after")
    def _reranker_learns(self) -> LiLiCorrOptions:
        if self.ce_weight == self.margin_weight == self.penalty_weight == 0:
            raise ValueError(
                "ce_weight, margin_weight and penalty_weight are all 0: the reranker would stay random; set one above 0"
            )
        return self

    def resolve_lattice_size(self, hidden_size: int) -> int:
        """Return the width of the transformer over the candidates for a target of width `hidden_size`.

        Raises:
            ConfigError: the heads do not divide it.
        """
        size = self.lattice_size or default_lattice_size(hidden_size)
        if size % self.lattice_heads:
            raise ConfigError(
                f"lilicorr: lattice_heads {self.lattice_heads} do not divide the width {size} of the transformer over the "
                "candidates: set lattice_size or lattice_heads"
            )
        return size


def default_lattice_size(hidden_size: int) -> int:
    """Return the width of the transformer where no option says it, for a target of width `hidden_size`."""
    return min(hidden_size, WIDEST_DEFAULT)


def _fit_candidates(default: int, given: Mapping[str, Any], target: TargetSizes) -> int:
    """Return the most candidates, of the numbers that servers take, that a vocabulary has."""
    return max(each for each in SERVED_CANDIDATES if each <= min(default, target.vocab_size))


def _fit_lattice_heads(default: int, given: Mapping[str, Any], target: TargetSizes) -> int:
    """Return the largest number of heads that divides the default width; an entry's own width has to suit the default."""
    if given.get("lattice_size") is not None:
        return default
    width = default_lattice_size(target.hidden_size)
    return max(heads for heads in range(1, default + 1) if width % heads == 0)


def check_lilicorr(options: LiLiCorrOptions, target: TargetSizes) -> None:
    """Raise ConfigError for what DFlash refuses, channels that are not whole groups, or more candidates than tokens."""
    check_dflash(options, target)
    if options.conv_group_size is not None:
        check_groups(options.strategy, options.conv_group_size, target.hidden_size)
    if options.candidate_topk > target.vocab_size:
        raise ConfigError(
            f"lilicorr: candidate_topk {options.candidate_topk}: the target has {target.vocab_size} tokens only"
        )


def _servers_refuse(options: LiLiCorrOptions, taps: tuple[LayerTap, ...]) -> str | None:
    if options.candidate_topk not in SERVED_CANDIDATES:
        return f"candidate_topk {options.candidate_topk}: SGLang takes a power of two, at most 16"
    return refuse_anchored_windows(options, taps)


def _list_metric_sums(options: LiLiCorrOptions) -> MetricSums:
    return MetricSums(options.block_size - 1, ("loss", "in_lattice"), ("accept_len", "base_accept_len", "lattice_len"))


LILICORR = register_strategy(
    StrategySpec(
        name=LiLiCorrOptions.strategy,
        description="LiLiCorr: a block of DFlash, its best candidates reranked by a small transformer over all of them.",
        options=LiLiCorrOptions,
        taps=choose_dflash_taps,
        factory="draftworks.strategies.lilicorr.strategy:LiLiCorrStrategy",
        fitted={**FITTED, "candidate_topk": _fit_candidates, "lattice_heads": _fit_lattice_heads},
        check=check_lilicorr,
        packing_refusal=allow_packing,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="sglang_lilicorr",
                description="SGLang 0.5.23 with DFlash, and vLLM from 0.32 on: z-lab's layout with the reranker.",
                factory="draftworks.strategies.lilicorr.export:SglangLiLiCorr",
                reader="draftworks.strategies.lilicorr.reader:read_sglang_lilicorr",
                counting="layer_output",
                refuses=_servers_refuse,
            ),
        ),
    )
)
