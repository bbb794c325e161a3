"""The options of MTP fine-tuning, and its registration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftworks.config.strategies import (
    ExportSpec,
    MetricSums,
    StrategyOptions,
    StrategySpec,
    TargetSizes,
    allow_packing,
    register_strategy,
)
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap

_KNOWN = 2
"""Tokens of a sample before the first proposed one: the one at the position, and the next."""


class MtpOptions(StrategyOptions):
    """The target's own layer for further tokens (multi-token prediction), trained on its own states."""

    num_steps: int = Field(
        default=3, ge=1, le=32, description="Draft steps unrolled in training, which is the length of a proposal."
    )
    step_decay: float = Field(
        default=0.6, gt=0, le=1, description="Weight of step i's loss is step_decay ** i, divided by the sum of all."
    )
    attends: Literal["chain", "step"] = Field(
        default="chain",
        description="What a later step sees in training: the first step's rows and its own chain, as servers do; "
        "or the rows of its own step, as speculators trains (FastMTP). Proposals are those of servers.",
    )


def choose_no_taps(num_layers: int, options: MtpOptions) -> tuple[LayerTap, ...]:
    """Return none: the layer reads the target's last hidden state alone."""
    return ()


def check_mtp(options: MtpOptions, target: TargetSizes) -> None:
    """Raise ConfigError for a proposal longer than any sample."""
    if options.num_steps + _KNOWN > target.max_length:
        raise ConfigError(
            f"mtp: num_steps {options.num_steps} does not fit into samples of at most {target.max_length} tokens: "
            "lower it, or raise max_length"
        )


def _list_metric_sums(options: MtpOptions) -> MetricSums:
    return MetricSums(options.num_steps)


MTP = register_strategy(
    StrategySpec(
        name="mtp",
        description="MTP: the target's own layer for further tokens, fine-tuned on its own states.",
        options=MtpOptions,
        taps=choose_no_taps,
        factory="draftworks.strategies.mtp.strategy:MtpStrategy",
        fitted={"num_steps": lambda default, given, target: max(1, min(default, target.max_length - _KNOWN))},
        check=check_mtp,
        packing_refusal=allow_packing,
        metric_sums=_list_metric_sums,
        exports=(
            ExportSpec(
                name="target_mtp",
                description="The target's own names and config: SGLang takes the folder as the draft's path.",
                factory="draftworks.strategies.mtp.export:TargetMtp",
                reader="draftworks.strategies.mtp.reader:read_target_mtp",
                counting="layers_passed",
            ),
            ExportSpec(
                name="speculators_mtp",
                description="speculators 0.9.0, which knows Qwen3-Next's and Qwen3.5's layers; vLLM refuses it.",
                factory="draftworks.strategies.mtp.export:SpeculatorsMtp",
                reader="draftworks.strategies.mtp.reader:read_speculators_mtp",
                counting="layers_passed",
                model_types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
            ),
            ExportSpec(
                name="gguf_mtp",
                description="llama.cpp's server: a GGUF file with the target's embedding and head. Not quantised.",
                factory="draftworks.strategies.mtp.export_gguf:GgufMtp",
                reader="draftworks.strategies.mtp.reader_gguf:read_gguf_mtp",
                counting="layers_passed",
                model_types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
                on_request=True,
            ),
        ),
    )
)
