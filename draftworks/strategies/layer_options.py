"""Options of the decoder layers that drafts are made of."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from draftworks.strategies.spec import StrategyOptions


class LayerOptions(StrategyOptions):
    """What a draft's layers take from the target unless they have their own: drafts of peers often do."""

    structural: ClassVar[tuple[str, ...]] = ("head_dim", "rms_norm_eps", "rope")
    added: ClassVar[tuple[str, ...]] = structural

    head_dim: int | None = Field(None, gt=0, multiple_of=2, description="Of attention; default the target's.")
    rms_norm_eps: float | None = Field(None, gt=0, description="Default the target's.")
    rope: dict[str, Any] | None = Field(
        None, description="Rotary positions, as rope_parameters of transformers 5; default the target's."
    )

    @field_validator("rope")
    @classmethod
    def _says_which_rope(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        missing = [] if value is None else [key for key in ("rope_type", "rope_theta") if key not in value]
        if missing:
            raise ValueError(f"expected rope_type and rope_theta among its keys, {' and '.join(missing)} missing")
        return value
