"""Domino's options and its registration."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from draftworks.config.strategies import ExportSpec, MetricSums, StrategySpec, allow_packing, register_strategy
from draftworks.storage.identity import LayerTap
from draftworks.strategies.dflash.options import (
    FITTED,
    DFlashOptions,
    check_dflash,
    choose_dflash_taps,
    refuse_anchored_windows,
)


class DominoOptions(DFlashOptions):
    """Domino: a block of DFlash whose later tokens are corrected by those before them (SpecForge, ModelOpt, SGLang)."""

    strategy: ClassVar[str] = "domino"
    structural = (*DFlashOptions.structural, "shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")

    shift_label: bool = Field(
        default=True,
        description="The anchor's own place in a block proposes too, so that a block of n tokens learns n labels, not n - 1.",
    )
    pure_draft_prefix_len: int = Field(
        default=1, ge=0, description="Number of first proposals of a block that are not corrected. SGLang takes 1 only."
    )
    emb_dim: int = Field(default=256, ge=1, description="Width of the correction's bottleneck.")
    gru_hidden_dim: int = Field(
        default=1024, ge=1, description="Size of the state of the GRU that reads the tokens before a proposal."
    )
    lambda_base_start: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the uncorrected proposals in the loss, at the first step.",
    )
    lambda_base_decay_ratio: float = Field(
        default=0.5, ge=0, le=1, description="Part of the training over which that share falls to 0."
    )

    @model_validator(mode="after")
    def _something_is_corrected(self) -> DominoOptions:
        if self.pure_draft_prefix_len >= self.labels:
            raise ValueError(
                f"pure_draft_prefix_len {self.pure_draft_prefix_len} leaves none of the {self.labels} proposals of a block "
                f"to correct: expected 0..{self.labels - 1}"
            )
        return self

    @property
    def labels(self) -> int:
        """Labels of a block, which is the number of tokens that it can propose."""
        return self.block_size if self.shift_label else self.block_size - 1

    def compute_lambda_base(self, step: int, total_steps: int) -> float:
        """Return the share of the base loss: λ_start · (1 - step / ⌊total_steps · ratio⌋), at least 0; 0 without a horizon (SpecForge)."""
        if total_steps <= 0:
            return 0.0
        falling = max(1, int(total_steps * self.lambda_base_decay_ratio))
        return self.lambda_base_start * (1 - min(step / falling, 1.0))


def _sglang_refuses(options: DominoOptions, taps: tuple[LayerTap, ...]) -> str | None:
    if options.pure_draft_prefix_len != 1:
        return f"pure_draft_prefix_len {options.pure_draft_prefix_len}: SGLang, which alone serves Domino, takes 1 only"
    return refuse_anchored_windows(options, taps)


def _list_metric_sums(options: DominoOptions) -> MetricSums:
    return MetricSums(options.labels, by_block=("accept_len", "base_accept_len"))


DOMINO = register_strategy(
    StrategySpec(
        name=DominoOptions.strategy,
        description="Domino: a block of DFlash, corrected token after token by a GRU over what it has proposed so far.",
        options=DominoOptions,
        taps=choose_dflash_taps,
        factory="draftworks.strategies.domino.strategy:DominoStrategy",
        uses_last_hidden=False,
        fitted=FITTED,
        check=check_dflash,
        packing_refusal=allow_packing,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="zlab_domino",
                description="SGLang 0.5.23 with Domino: z-lab's layout with the correction; SpecForge calls its class DominoDraftModel.",
                factory="draftworks.strategies.domino.export:ZlabDomino",
                reader="draftworks.strategies.domino.reader:read_zlab_domino",
                counting="layer_output",
                refuses=_sglang_refuses,
            ),
        ),
    )
)
