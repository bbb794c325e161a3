"""Options of a target's data mix: further data sets, weights of slices, shares of slices. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, field_validator

from draftworks.config.base import Spec
from draftworks.config.responses import ResponseSpec
from draftworks.storage.names import require_name

THINKING, ON, OFF = "thinking", "on", "off"
"""The slice column of prompts by whether the target is to think, and its values."""


class MixSpec(Spec):
    """Further data of a target: conversations of other data sets, trained on and held out like those of `dataset`."""

    datasets: list[str] = Field(
        default_factory=list,
        description="Names of further entries in registry/datasets/, such as one of served prompts.",
    )
    weights: str | None = Field(
        default=None,
        description="File that `draftworks slices --save` wrote, relative to the registry: conversations of slices that fell "
        "are taken more often. Needs data.max_conversations.",
    )
    shares: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="Shares of the slices of one column among the conversations that are trained on, such as `thinking: {on: "
        "0.5, off: 0.5}`; they add up to 1. By thinking, prompts are asked so, and what is measured on is asked both ways.",
    )

    @field_validator("datasets")
    @classmethod
    def _check_names(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"expected each data set once, found {', '.join(value)}")
        return [require_name(name) for name in value]

    @field_validator("shares", mode="before")
    @classmethod
    def _name_slices(cls, value: Any) -> Any:
        """Return the shares with their slices as text: on and off are true and false in YAML."""
        if not isinstance(value, dict):
            return value
        names = {True: ON, False: OFF}
        return {
            column: {names[key] if isinstance(key, bool) else str(key): share for key, share in found.items()}
            if isinstance(found, dict)
            else found
            for column, found in value.items()
        }

    @field_validator("shares")
    @classmethod
    def _check_shares(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        if len(value) > 1:
            raise ValueError(f"expected shares by one column, found {', '.join(value)}")
        for column, shares in value.items():
            if any(share < 0 for share in shares.values()) or not math.isclose(sum(shares.values()), 1, abs_tol=1e-6):
                found = ", ".join(f"{name} {share:g}" for name, share in shares.items())
                raise ValueError(f"{column}: expected shares from 0 on that add up to 1, found {found or 'none'}")
            if column == THINKING and set(shares) != {ON, OFF}:
                raise ValueError(f"{THINKING}: expected a share for on and one for off, found {', '.join(shares)}")
        return value

    @property
    def asks_both_ways(self) -> bool:
        """Whether prompts are asked with thinking on and off, as shares say."""
        return THINKING in self.shares

    def require_effect(self, dataset: str, max_conversations: int | None) -> None:
        """Raise ValueError if the target's own data set is named again, or if weights have nothing to choose among."""
        if dataset in self.datasets:
            raise ValueError(f"mix.datasets: {dataset} is the target's dataset already: leave it out")
        if self.weights is not None and max_conversations is None:
            raise ValueError(
                "mix.weights choose among more conversations than are used: set data.max_conversations below their number"
            )

    def require_answers(self, responses: ResponseSpec) -> None:
        """Raise ValueError if prompts are to be asked with thinking on and off, and these answers cannot be."""
        if not self.asks_both_ways:
            return
        if responses.mode == "passthrough":
            raise ValueError("mix.shares: thinking: answers that are passed through are given: set mode to regenerate")
        if responses.thinking is not None:
            raise ValueError("mix.shares: thinking decides how prompts are asked: leave responses.thinking out")
        if responses.endpoint is not None and responses.endpoint.server == "openai":
            raise ValueError(
                "mix.shares: thinking: OpenAI's interface has no field for it: set responses.endpoint.server to what runs there"
            )
