"""Options of a draft's decoder layers."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from draftworks.config.option_checks import check_heads
from draftworks.config.strategies import StrategyOptions

ROPE_KEYS = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": (
        *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("rope_theta", "factor"),
}
"""The rope types that drafts can compute, with the parameters that each requires."""


class LayerOptions(StrategyOptions):
    """Layer parameters that default to the target's; drafts made by other software often have their own."""

    structural: ClassVar[tuple[str, ...]] = ("head_dim", "rms_norm_eps", "rope")
    added: ClassVar[tuple[str, ...]] = structural

    head_dim: int | None = Field(
        default=None, gt=0, multiple_of=2, description="Size of an attention head; default the target's."
    )
    rms_norm_eps: float | None = Field(default=None, gt=0, description="Default the target's.")
    intermediate_size: int | None = Field(default=None, gt=0, description="Width of the MLPs; default the target's.")
    num_heads: int | None = Field(default=None, gt=0, description="Default the target's.")
    num_kv_heads: int | None = Field(default=None, gt=0, description="Default the target's.")
    rope: dict[str, Any] | None = Field(
        default=None, description="Rotary positions, as rope_parameters of transformers 5; default the target's."
    )

    @field_validator("rope")
    @classmethod
    def _check_rope(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        kind = value.get("rope_type")
        if kind not in ROPE_KEYS:
            raise ValueError(f"rope_type: expected one of {', '.join(ROPE_KEYS)}, found {kind!r}")
        wrong = [key for key in ROPE_KEYS[kind] if not _is_positive(value.get(key))]
        if wrong:
            raise ValueError(f"rope of type {kind}: expected a number above 0 as {' and '.join(wrong)}, found {value}")
        return value

    @model_validator(mode="after")
    def _check_head_numbers(self) -> LayerOptions:
        check_heads(self.num_heads, self.num_kv_heads)
        return self


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
