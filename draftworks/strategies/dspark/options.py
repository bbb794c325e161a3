"""DSpark's options and its registration."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from draftworks.config.draft_options import TeacherOptions
from draftworks.config.strategies import ExportSpec, MetricSums, StrategySpec, allow_packing, register_strategy
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


class DSparkOptions(DFlashOptions, TeacherOptions):
    """DSpark: a block of DFlash whose tokens know the one before them, and how likely each is to be accepted (DeepSpec, SpecForge)."""

    strategy: ClassVar[str] = "dspark"
    added = (*DFlashOptions.added, *TeacherOptions.added)
    structural = (
        *DFlashOptions.structural,
        *("markov_head_type", "markov_rank", "confidence_head", "confidence_with_markov"),
    )

    block_size: int = Field(
        default=7,
        ge=2,
        le=64,
        description="Tokens that a block proposes; the place of the last known one proposes the first.",
    )
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla",
        description="Input of the correction of a proposal's logits: the previous token alone, gated by the state, or a recurrent state over the block.",
    )
    markov_rank: int = Field(
        default=256, ge=0, description="Width of the previous token's embedding; 0: no Markov head."
    )
    confidence_head: bool = Field(
        default=True, description="Whether the draft predicts the probability that each proposal is accepted."
    )
    confidence_with_markov: bool = Field(
        default=True, description="The confidence head also reads the Markov embedding of the previous token."
    )
    ce_weight: float = Field(default=0.1, ge=0, description="Weight of the cross-entropy with the label.")
    tv_weight: float = Field(
        default=0.9,
        ge=0,
        description="Weight of the distance |q - p| between the target's distribution and the draft's.",
    )
    confidence_weight: float = Field(default=1.0, ge=0, description="Weight of the confidence head's cross-entropy.")

    @model_validator(mode="after")
    def _heads_fit(self) -> DSparkOptions:
        if self.markov_rank == 0 and self.markov_head_type != "vanilla":
            raise ValueError(
                f"markov_head_type {self.markov_head_type}, but markov_rank 0 is no Markov head: set a rank above 0, "
                "or leave markov_head_type out"
            )
        if self.markov_rank == 0 and self.confidence_head and self.confidence_with_markov:
            raise ValueError(
                "markov_rank 0 leaves no Markov embedding for the confidence head to read: set confidence_with_markov: false"
            )
        if self.ce_weight == self.tv_weight == 0:
            raise ValueError("ce_weight and tv_weight are both 0: no proposal would learn anything, set one above 0")
        if self.tv_weight == 0 and self.teacher_temperature != 1:
            raise ValueError("teacher_temperature softens the distance of tv_weight, which is 0: leave it out")
        return self


def _sglang_refuses(options: DSparkOptions, taps: tuple[LayerTap, ...]) -> str | None:
    if options.markov_rank == 0:
        return "markov_rank 0: SGLang takes no DSpark draft without a Markov head"
    return refuse_anchored_windows(options, taps)


def _llama_cpp_refuses(options: DSparkOptions, taps: tuple[LayerTap, ...]) -> str | None:
    if options.markov_head_type != "vanilla" or options.markov_rank == 0:
        return "llama.cpp has the vanilla Markov head and no other"
    if options.confidence_head and not options.confidence_with_markov:
        return "confidence_with_markov: false: llama.cpp's confidence head reads the Markov embedding too"
    return refuse_partial_windows(options, taps)


def _list_metric_sums(options: DSparkOptions) -> MetricSums:
    confidence = ("confidence_error",) if options.confidence_head else ()
    return MetricSums(options.block_size, ("loss", "acceptance", *confidence), ("accept_len", "tau"))


DSPARK = register_strategy(
    StrategySpec(
        name=DSparkOptions.strategy,
        description="DSpark: a block of DFlash, each token biased by the one before it, with a confidence for each.",
        options=DSparkOptions,
        taps=choose_dflash_taps,
        factory="draftworks.strategies.dspark.strategy:DSparkStrategy",
        fitted=FITTED,
        check=check_dflash,
        packing_refusal=allow_packing,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="zlab_dspark",
                description="SGLang 0.5.23 with DSpark, and SpecForge: z-lab's layout with the heads.",
                factory="draftworks.strategies.dspark.export:ZlabDSpark",
                reader="draftworks.strategies.dspark.reader:read_zlab_dspark",
                counting="layer_output",
                refuses=_sglang_refuses,
            ),
            ExportSpec(
                name="speculators_dspark",
                description="speculators 0.9.0 and, with a vanilla Markov head, vLLM; windows from the anchor only.",
                factory="draftworks.strategies.dspark.export:SpeculatorsDSpark",
                reader="draftworks.strategies.dspark.reader:read_speculators_dspark",
                counting="layers_passed",
                refuses=refuse_windows,
                uses_unscaled_embeddings=True,
            ),
            ExportSpec(
                name="gguf_dspark",
                description="llama.cpp's server: a GGUF file. Vanilla Markov head; not with a rope scaled as Llama 3.1's.",
                factory="draftworks.strategies.dspark.export_gguf:GgufDSpark",
                reader="draftworks.strategies.dspark.reader_gguf:read_gguf_dspark",
                counting="layers_passed",
                refuses=_llama_cpp_refuses,
                on_request=True,
            ),
        ),
    )
)
