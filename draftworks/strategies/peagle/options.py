"""P-EAGLE's options, its checks against a target, and its registration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from draftworks.config.draft_options import (
    LayerOptions,
    TeacherOptions,
    check_mask_token,
    check_served_heads,
    choose_eagle_taps,
    fit_draft_vocabulary,
)
from draftworks.config.strategies import ExportSpec, MetricSums, StrategySpec, TargetSizes, register_strategy
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap


class PEagleOptions(LayerOptions, TeacherOptions):
    """P-EAGLE (speculators, SpecForge): EAGLE-3's inputs, and several tokens proposed in one pass."""

    structural = (
        *LayerOptions.structural,
        "num_depths",
        "num_layers",
        "fc_norm",
        "norm_before_residual",
        "train_embeddings",
        "sliding_window",
    )
    execution = ("attention",)
    added = (*LayerOptions.added, *TeacherOptions.added, "sliding_window")

    num_depths: int = Field(default=8, ge=1, le=32, description="Tokens proposed in one pass.")
    down_sample_ratio: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of the positions trained on at one depth that the next one keeps; 1 keeps all.",
    )
    down_sample_ratio_min: float = Field(
        default=0.2, ge=0, le=1, description="No depth is trained on less than this share of the positions."
    )
    num_layers: int = Field(
        default=4, ge=1, description="Decoder layers of the draft; the first reads tokens beside states."
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
    mask_token_id: int | None = Field(
        default=None,
        ge=0,
        description="Token at places whose token is not known yet: one that no text has. Default the last id.",
    )
    train_embeddings: bool = Field(
        default=True,
        description="The draft has embeddings of its own, initially the target's. False: it uses the target's.",
    )
    fc_norm: bool = Field(default=False, description="Every tap has a norm of its own before they are fused.")
    norm_before_residual: bool = Field(
        default=False,
        description="The first layer's residual stream begins with the normed state, not with the state itself.",
    )
    sliding_window: int | None = Field(
        default=None,
        gt=1,
        description="Newest positions that every place sees, its own included; at least num_depths; default all.",
    )
    loss: Literal["token_mean", "specforge"] = Field(
        default="token_mean",
        description="Chains up to the end of an answer, per token; or the reference's rule and mean.",
    )
    attention: Literal["auto", "eager", "sdpa", "flex"] = Field(
        default="auto",
        description="Back end of attention, equal to rounding: auto is a fused kernel where there is one, else sdpa.",
    )

    @model_validator(mode="after")
    def _window_holds_a_chain(self) -> PEagleOptions:
        if self.sliding_window is not None and self.sliding_window < self.num_depths:
            raise ValueError(
                f"sliding_window {self.sliding_window} is shorter than a chain of num_depths {self.num_depths}: speculators "
                "and vLLM would compute different drafts. Raise it"
            )
        return self


def choose_peagle_taps(num_layers: int, options: PEagleOptions) -> tuple[LayerTap, ...]:
    """Return the taps of EAGLE-3.

    Raises:
        ConfigError: a tap is not inside the target, or taps collide.
    """
    return choose_eagle_taps("peagle", options.layer_ids, num_layers)


_KNOWN = 2
"""Tokens of a sample before the first proposed one: the one at the position, and the next."""


def check_peagle(options: PEagleOptions, target: TargetSizes) -> None:
    """Raise ConfigError for a mask token that the target does not have, a proposal longer than any sample, or a number of
    heads that no server supports.
    """
    if options.num_depths + _KNOWN > target.max_length:
        raise ConfigError(
            f"peagle: num_depths {options.num_depths} does not fit into samples of at most {target.max_length} tokens: "
            "lower it, or raise max_length"
        )
    check_mask_token("peagle", options.mask_token_id, target.vocab_size)
    check_served_heads("peagle", options.num_heads, target.hidden_size)


def _mean_over_micro_batches(options: PEagleOptions) -> str | None:
    """Return why samples cannot be packed: SpecForge's loss is a mean over a micro-batch, and a packed row has other samples."""
    return "with loss: specforge takes means over micro-batches" if options.loss == "specforge" else None


def _list_metric_sums(options: PEagleOptions) -> MetricSums:
    return MetricSums(options.num_depths, ("loss", "acceptance", "unconditional_acceptance"))


PEAGLE = register_strategy(
    StrategySpec(
        name="peagle",
        description="P-EAGLE: several tokens proposed in one pass of a few layers, EAGLE-3's rows followed by masks.",
        options=PEagleOptions,
        taps=choose_peagle_taps,
        factory="draftworks.strategies.peagle.strategy:PEagleStrategy",
        uses_vocab_mapping=True,
        heads_divide_hidden=True,
        fitted={
            "draft_vocab_size": fit_draft_vocabulary,
            "num_depths": lambda default, given, target: max(1, min(default, target.max_length - _KNOWN)),
        },
        check=check_peagle,
        packing_refusal=_mean_over_micro_batches,
        batch_means=lambda options: _mean_over_micro_batches(options) is not None,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="speculators_peagle",
                description="speculators 0.9.0 and vLLM with P-EAGLE (#41826), as 0.32 and 0.33.",
                factory="draftworks.strategies.peagle.export:SpeculatorsPEagle",
                reader="draftworks.strategies.peagle.reader:read_speculators_peagle",
                counting="layers_passed",
            ),
        ),
    )
)
