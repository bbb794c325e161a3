"""Options of strategies whose loss has the target's distribution as its teacher."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from draftworks.config.strategies import StrategyOptions


class TeacherOptions(StrategyOptions):
    """How the target's distribution teaches the draft. A class that inherits it takes over `added`."""

    added: ClassVar[tuple[str, ...]] = ("teacher_temperature",)

    teacher_temperature: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="T: draft and target are compared as softmax(logits / T), and that loss is multiplied by T². Leave it at 1 "
        "for servers that draft greedily, as most do.",
    )
