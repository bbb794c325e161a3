"""Options of rung 4, and of what rung 1 says of sampling servers. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import DistinctNumbers, Dtype, Spec, require_distinct
from draftworks.config.decoding import GREEDY, AcceptanceRule, Decoding
from draftworks.config.server_rules import list_usual_rules


class LoopSpec(Spec):
    """Rung 4 of the acceptance ladder: real speculative decoding, one prompt at a time."""

    prompts: int = Field(default=16, ge=0, description="Held-out prompts to decode; 0 leaves the rung out.")
    temperatures: DistinctNumbers = Field(
        default=[0.0], description="0 is greedy; others sample, on rung 1 too, by each of `rules`."
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Above temperature 0: the target samples from so many likeliest tokens; null: all.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Above temperature 0: and from the fewest of them with this mass; 1 = all. Servers leave the draft uncut.",
    )
    rules: list[AcceptanceRule] | None = Field(
        default=None,
        min_length=1,
        description="Rules of acceptance above temperature 0; null: those that servers have for the strategy unasked. block is "
        "of rung 4 only.",
    )
    compute_dtype: Dtype = Field(default="float32", description="Dtype of the target's weights and activations.")

    @field_validator("temperatures")
    @classmethod
    def _check_temperatures(cls, value: list[float]) -> list[float]:
        if any(temperature < 0 for temperature in value):
            raise ValueError(f"a temperature is at least 0, found {value}")
        return value

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, value: list[AcceptanceRule] | None) -> list[AcceptanceRule] | None:
        require_distinct([str(rule) for rule in value or ()])
        return value

    @model_validator(mode="after")
    def _check_effect(self) -> LoopSpec:
        given = {"top_k": self.top_k is not None, "top_p": self.top_p != 1, "rules": self.rules is not None}
        useless = [name for name, is_given in given.items() if is_given]
        if useless and not self._sampled:
            raise ValueError(
                f"{', '.join(useless)} without effect: temperatures {self.temperatures} are greedy. Add one above 0, or leave "
                f"{'it' if len(useless) == 1 else 'them'} out"
            )
        return self

    @property
    def _sampled(self) -> list[float]:
        return [temperature for temperature in self.temperatures if temperature > 0]

    def list_decodings(self, strategy: str) -> tuple[Decoding, ...]:
        """Return what rung 4 decodes by, for drafts of a strategy, in the order of the temperatures."""
        rules = self._list_rules(strategy)
        return tuple(
            decoding
            for temperature in self.temperatures
            for decoding in (
                [Decoding(temperature, rule, self.top_k, self.top_p) for rule in rules] if temperature else [GREEDY]
            )
        )

    def list_simulated(self, strategy: str) -> tuple[Decoding, ...]:
        """Return those that rung 1 is computed for: token by token, and not greedy."""
        return tuple(one for one in self.list_decodings(strategy) if one.rule not in (None, "block"))

    def _list_rules(self, strategy: str) -> tuple[AcceptanceRule, ...]:
        return list_usual_rules(strategy) if self.rules is None else tuple(self.rules)

    def to_identity(self, strategies: Iterable[str]) -> dict[str, Any]:
        """Return the options that determine the figures of these strategies' drafts, or without any the greedy figures.

        Those of sampling are left out where nothing is sampled, so that results from before there were rules stay hits.
        """
        decided = self.model_dump(include={"prompts", "temperatures", "compute_dtype"})
        rules = {name: list(self._list_rules(name)) for name in sorted(strategies)}
        if not self._sampled or not rules:
            return decided
        return {**decided, "rules": rules, "top_k": self.top_k, "top_p": self.top_p}
