"""How a server chooses tokens, and the rule by which it accepts those of a draft. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from draftworks.errors import ConfigError

AcceptanceRule = Literal["greedy_draft", "rejection", "block"]
RULES: tuple[AcceptanceRule, ...] = get_args(AcceptanceRule)
RULE_MEANINGS: dict[AcceptanceRule, str] = {
    "greedy_draft": "the draft proposes its likeliest token x, which is accepted with the target's probability p(x); "
    "else the next token is drawn from p without x",
    "rejection": "the draft draws x from its distribution q, which is accepted with probability min(1, p(x) / q(x)); "
    "else the next token is drawn from what p has above q",
    "block": "the draft draws as for `rejection`, and its tokens are accepted jointly, as a block",
}
"""p is the target's distribution, at the temperature and cut by top-k and top-p; q is at the temperature alone."""

_SUFFIX = re.compile(r"t(?P<temperature>[^_]+)(?:_k(?P<top_k>\d+))?(?:_p(?P<top_p>[^_]+))?(?:_(?P<rule>[a-z_]+))?")


@dataclass(frozen=True)
class Decoding:
    """Temperature and cuts of a server, and its rule of acceptance. Greedy decoding has neither cuts nor a rule.

    The order is that of vLLM 0.33 (`v1/sample/rejection_sampler.py`, `apply_sampling_constraints`) and of SGLang 0.5.23
    (`srt/speculative/eagle_utils.py`, `eagle_sample`): logits / temperature, then top-k, then top-p of what is left, with
    its sum as 1. Both leave the draft's distribution uncut.

    Attributes:
        temperature: 0 is greedy.
        rule: None at temperature 0 only.
        top_k: None is no limit.
        top_p: 1 is no limit.

    Raises:
        ConfigError: a value is out of its range, or of no effect.
    """

    temperature: float = 0.0
    rule: AcceptanceRule | None = None
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            raise ConfigError(
                f"decoding: expected a temperature of 0 or more, top_k of 1 or more, top_p above 0 and up to 1, found {self}"
            )
        if self.rule is not None and self.rule not in RULES:
            raise ConfigError(f"rule of acceptance: expected one of {', '.join(RULES)}, found {self.rule!r}")
        if self.temperature == 0 and (self.rule, self.top_k, self.top_p) != (None, None, 1.0):
            raise ConfigError(f"greedy decoding has no rule, top_k or top_p: leave them out, found {self}")
        if self.temperature > 0 and self.rule is None:
            raise ConfigError(f"decoding at temperature {self.temperature:g}: expected a rule, {' or '.join(RULES)}")

    @property
    def draft_temperature(self) -> float:
        """The temperature at which the draft proposes: 0 where its likeliest tokens are what is verified."""
        return 0.0 if self.rule in (None, "greedy_draft") else self.temperature

    @property
    def target(self) -> Decoding:
        """What decides the target's distribution alone: equal for all rules."""
        return self if self.temperature == 0 else replace(self, rule="rejection")

    @property
    def suffix(self) -> str:
        """The end of a metric's name: `t0`, `t0.7_greedy_draft`, `t0.7_k20_p0.9_rejection`."""
        parts = [f"t{self.temperature:g}"]
        parts += [] if self.top_k is None else [f"k{self.top_k}"]
        parts += [] if self.top_p == 1 else [f"p{self.top_p:g}"]
        return "_".join([*parts, *([] if self.rule is None else [self.rule])])

    @classmethod
    def parse(cls, suffix: str) -> Decoding:
        """Return the decoding with that suffix. Figures of before rules were named are those of `rejection`.

        Raises:
            ConfigError: it is none.
        """
        found = _SUFFIX.fullmatch(suffix)
        if found is None:
            raise ConfigError(f"decoding: expected the end of a metric such as t0.7_greedy_draft, found {suffix!r}")
        top_k, top_p = found["top_k"], found["top_p"]
        return cls._of(float(found["temperature"]), found["rule"], top_k and int(top_k), float(top_p or 1))

    @classmethod
    def _of(cls, temperature: float, rule: Any, top_k: Any, top_p: float) -> Decoding:
        return cls(temperature, rule or ("rejection" if temperature else None), top_k, top_p)

    def describe(self) -> str:
        """Return it in words, without the rule: `greedy`, `temperature 0.7, top-k 20, top-p 0.9`."""
        if self.temperature == 0:
            return "greedy"
        parts = [f"temperature {self.temperature:g}"]
        parts += [] if self.top_k is None else [f"top-k {self.top_k}"]
        return ", ".join(parts + ([] if self.top_p == 1 else [f"top-p {self.top_p:g}"]))

    def to_json(self) -> dict[str, Any]:
        """Return the values, without cuts that are not made, and without a rule where there is none."""
        values: dict[str, Any] = {"temperature": self.temperature}
        values |= {} if self.rule is None else {"rule": self.rule}
        values |= {} if self.top_k is None else {"top_k": self.top_k}
        return values | ({} if self.top_p == 1 else {"top_p": self.top_p})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Decoding:
        """Read the values of `to_json`; others are ignored. What has no rule is from before there were any: `rejection`."""
        return cls._of(values["temperature"], values.get("rule"), values.get("top_k"), values.get("top_p", 1.0))


GREEDY = Decoding()
