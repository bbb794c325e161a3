"""EAGLE-3's options, its taps, its checks against a target, and its registration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from draftworks.config.draft_options import (
    LayerOptions,
    TeacherOptions,
    check_served_heads,
    choose_eagle_taps,
    fit_draft_vocabulary,
)
from draftworks.config.strategies import ExportSpec, MetricSums, StrategySpec, TargetSizes, register_strategy
from draftworks.storage.identity import LayerTap


class Eagle3Options(LayerOptions, TeacherOptions):
    """EAGLE-3: one decoder layer over fused taps of the target, trained on its own outputs (test-time training)."""

    structural = (
        *LayerOptions.structural,
        *("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "feedback", "sliding_window"),
    )
    execution = ("attention",)
    added = (
        *LayerOptions.added,
        *TeacherOptions.added,
        *("norm_before_fc", "norm_before_residual", "sliding_window", "short_unroll"),
    )

    ttt_length: int = Field(
        default=7, ge=1, le=32, description="Draft steps unrolled in training, which is the length of a proposal."
    )
    draft_vocab_size: int = Field(
        default=32000,
        ge=8,
        description="Most frequent supervised tokens the head predicts; by default at most the target's.",
    )
    layer_ids: list[int] | None = Field(
        default=None,
        min_length=1,
        description="Taps as hf_index, ascending, one or more; default [2, L//2, L-3], spread over the layers of a shallow target.",
    )
    step_decay: float = Field(default=0.8, gt=0, le=1, description="Weight of step i's loss is step_decay ** i.")
    short_unroll: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="First share of the training that unrolls two draft steps only, with the weight of all. A step takes half "
        "the time there; what is learnt is mostly the same as in the later steps.",
    )
    loss: Literal["token_mean", "specforge"] = Field(
        default="token_mean",
        description="Normalisation: by supervised tokens, or the reference's mean over all positions.",
    )
    fc_norm: bool = Field(
        default=False, description="EAGLE-3.1: every tap has a norm of its own before they are fused."
    )
    norm_before_fc: bool = Field(
        default=False,
        description="One norm over all taps side by side before they are fused; not together with fc_norm.",
    )
    norm_before_residual: bool = Field(
        default=False,
        description="The layer's residual stream begins with the normed state, not with the state itself.",
    )
    norm_output: bool = Field(
        default=True,
        description="The head reads the normed state. False as in SpecForge, which no server supports.",
    )
    feedback: Literal["pre_norm", "post_norm"] = Field(
        default="pre_norm",
        description="State that the next step takes over; post_norm is EAGLE-3.1 of speculators, vLLM and SGLang.",
    )
    sliding_window: int | None = Field(
        default=None,
        gt=1,
        description="Positions of the text that a chain sees, back from its first one, which is included; default all.",
    )
    objective: Literal["ce", "lk_alpha", "lk_lambda"] = Field(
        default="ce",
        description="Cross-entropy with the target, log acceptance probability, or the two blended (LK losses).",
    )
    kl_scale: float = Field(
        default=1.0, ge=0, description="lk_lambda: share of cross-entropy where nothing is accepted."
    )
    kl_decay: float = Field(default=1.0, ge=0, description="lk_lambda: how fast that share falls as acceptance grows.")
    attention: Literal["auto", "eager", "sdpa", "flex"] = Field(
        default="auto",
        description="Back end of attention, equal to rounding: auto is a fused kernel where there is one, else sdpa.",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> Eagle3Options:
        if not self.norm_output and self.feedback == "post_norm":
            raise ValueError("feedback post_norm feeds back the normed output, but norm_output is false: change one")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc both norm the taps before they are fused: set one of them")
        if self.objective != "lk_lambda" and (self.kl_scale, self.kl_decay) != (1.0, 1.0):
            raise ValueError(f"kl_scale and kl_decay belong to objective lk_lambda, but objective is {self.objective}")
        return self


def choose_eagle3_taps(num_layers: int, options: Eagle3Options) -> tuple[LayerTap, ...]:
    """Return the taps of EAGLE-3, ascending: three unless the options name others.

    Raises:
        ConfigError: a tap is not inside the target, or taps collide.
    """
    return choose_eagle_taps("eagle3", options.layer_ids, num_layers)


def check_eagle3(options: Eagle3Options, target: TargetSizes) -> None:
    """Raise ConfigError for a number of heads that no server supports."""
    check_served_heads("eagle3", options.num_heads, target.hidden_size)


_LLAMA_CPP_TAPS = 3


def _mean_over_positions(options: Eagle3Options) -> str | None:
    """Return why samples cannot be packed: SpecForge's loss depends on batching and padding; a packed row would change it."""
    return "with loss: specforge takes means over padded positions" if options.loss == "specforge" else None


def _no_server_computes(options: Eagle3Options, taps: tuple[LayerTap, ...]) -> str | None:
    if not options.norm_output:
        return "norm_output: false: servers give the head the normed state, so they would propose other tokens"
    return None


def _sglang_refuses(options: Eagle3Options, taps: tuple[LayerTap, ...]) -> str | None:
    unknown = [name for name in ("norm_before_fc", "norm_before_residual") if getattr(options, name)]
    if unknown:
        return f"{' and '.join(unknown)}: SGLang does not know {'it' if len(unknown) == 1 else 'them'}, and would load the draft as another"
    if options.sliding_window is not None:
        return "sliding_window: SGLang reads none from an EAGLE-3 draft's config, so it would attend to everything"
    if options.feedback == "post_norm":
        return "feedback: post_norm: SGLang before #24663 would feed back the un-normed state without a word"
    if len(taps) == 1:
        return "one tap: SGLang skips `fc` where the target's features are as wide as the embedding"
    return _no_server_computes(options, taps)


def _llama_cpp_refuses(options: Eagle3Options, taps: tuple[LayerTap, ...]) -> str | None:
    if options.fc_norm:
        return "fc_norm: llama.cpp has one norm over all taps, or none"
    if options.feedback == "post_norm":
        return "feedback: post_norm: llama.cpp feeds back the state before the norm"
    if options.sliding_window is not None:
        return "sliding_window: llama.cpp's EAGLE-3 attends to everything"
    if len(taps) != _LLAMA_CPP_TAPS:
        return f"{len(taps)} taps: llama.cpp loads EAGLE-3 drafts of {_LLAMA_CPP_TAPS}"
    return _no_server_computes(options, taps)


def _list_metric_sums(options: Eagle3Options) -> MetricSums:
    return MetricSums(options.ttt_length, ("loss", "acceptance", "unconditional_acceptance"))


EAGLE3 = register_strategy(
    StrategySpec(
        name="eagle3",
        description="EAGLE-3: autoregressive draft of one decoder layer over fused layers of the target.",
        options=Eagle3Options,
        taps=choose_eagle3_taps,
        factory="draftworks.strategies.eagle3.strategy:Eagle3Strategy",
        uses_vocab_mapping=True,
        fitted={"draft_vocab_size": fit_draft_vocabulary},
        check=check_eagle3,
        heads_divide_hidden=True,
        packing_refusal=_mean_over_positions,
        batch_means=lambda options: _mean_over_positions(options) is not None,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="sglang_eagle3",
                description="SGLang, and what reads its layout. fc_norm and other than three taps need its #24663 (May 2026).",
                factory="draftworks.strategies.eagle3.export:SglangEagle3",
                reader="draftworks.strategies.eagle3.reader:read_sglang_eagle3",
                # SGLang adds one itself when it is given ids; only its own default list is counted as layers passed.
                counting="layer_output",
                refuses=_sglang_refuses,
                revision=2,  # names the layers for vLLM too
            ),
            ExportSpec(
                name="speculators_eagle3",
                description="speculators 0.9.0 and vLLM.",
                factory="draftworks.strategies.eagle3.export_speculators:SpeculatorsEagle3",
                reader="draftworks.strategies.eagle3.reader:read_speculators_eagle3",
                counting="layers_passed",
                refuses=_no_server_computes,
            ),
            ExportSpec(
                name="gguf_eagle3",
                description="llama.cpp's server: a GGUF file. Three taps, feedback pre_norm.",
                factory="draftworks.strategies.eagle3.export_gguf:GgufEagle3",
                reader="draftworks.strategies.eagle3.reader_gguf:read_gguf_eagle3",
                # A layer there is named by the stream that it reads.
                counting="layers_passed",
                refuses=_llama_cpp_refuses,
                on_request=True,
            ),
        ),
    )
)
