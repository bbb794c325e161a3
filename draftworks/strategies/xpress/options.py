"""XPress's options and its registration."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from draftworks.config.draft_options import TeacherOptions
from draftworks.config.strategies import ExportSpec, MetricSums, StrategySpec, allow_packing, register_strategy
from draftworks.strategies.dflash.options import (
    FITTED,
    DFlashOptions,
    check_dflash,
    choose_dflash_taps,
    refuse_anchored_windows,
    refuse_windows,
)


class XPressOptions(DFlashOptions, TeacherOptions):
    """XPress (arXiv 2608.02438): a block of DFlash whose tokens are refined together, in a few parallel passes (speculators)."""

    strategy: ClassVar[str] = "xpress"
    added = (*DFlashOptions.added, *TeacherOptions.added)
    structural = (*DFlashOptions.structural, "refiner_rank", "mlp_ratio", "jacobi_passes")

    block_size: int = Field(
        default=8, ge=2, le=64, description="Tokens of a block: the last known one, then the proposals."
    )
    refiner_rank: int = Field(default=256, ge=1, description="Width in which the refiner works.")
    mlp_ratio: int = Field(default=2, ge=1, description="Width of the refiner's MLP, in refiner_rank.")
    jacobi_passes: int = Field(
        default=6,
        ge=1,
        description="Parallel passes of the refiner over a block, each on the tokens of the one before.",
    )
    ce_weight: float = Field(default=0.1, ge=0, description="Weight of the cross-entropy with the label.")
    tv_weight: float = Field(
        default=0.9,
        ge=0,
        description="Weight of the probability that rejection sampling refuses a proposal, ½|q - p|.",
    )
    consistency_passes: int = Field(
        default=3, ge=0, description="Passes trained on the draft's own tokens, beside the one on the true tokens."
    )
    consistency_weight: float = Field(default=0.3, ge=0, description="Weight of the mean loss of these passes.")
    base_weight: float = Field(default=0.6, ge=0, description="Weight of the loss of the logits before refinement.")

    @model_validator(mode="after")
    def _something_is_learned(self) -> XPressOptions:
        if self.ce_weight == self.tv_weight == 0:
            raise ValueError("ce_weight and tv_weight are both 0: no proposal would learn anything, set one above 0")
        if self.tv_weight == 0 and self.teacher_temperature != 1:
            raise ValueError("teacher_temperature softens the distance of tv_weight, which is 0: leave it out")
        return self


def _list_metric_sums(options: XPressOptions) -> MetricSums:
    return MetricSums(options.block_size - 1, ("loss", "acceptance"), ("accept_len", "base_accept_len", "tau"))


XPRESS = register_strategy(
    StrategySpec(
        name=XPressOptions.strategy,
        description="XPress: a block of DFlash, refined in parallel passes by a small head that mixes it causally.",
        options=XPressOptions,
        taps=choose_dflash_taps,
        factory="draftworks.strategies.xpress.strategy:XPressStrategy",
        fitted=FITTED,
        check=check_dflash,
        packing_refusal=allow_packing,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="speculators_xpress",
                description="speculators 0.9.0, and no server; windows from the anchor only.",
                factory="draftworks.strategies.xpress.export:SpeculatorsXPress",
                reader="draftworks.strategies.xpress.reader:read_speculators_xpress",
                counting="layers_passed",
                refuses=refuse_windows,
                uses_unscaled_embeddings=True,
            ),
            ExportSpec(
                name="vllm_xpress",
                description="vLLM from 0.33 on.",
                factory="draftworks.strategies.xpress.export:VllmXPress",
                reader="draftworks.strategies.xpress.reader:read_vllm_xpress",
                counting="layer_output",
                refuses=refuse_anchored_windows,
            ),
        ),
    )
)
