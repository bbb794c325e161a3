"""How a server chooses tokens, and the rule by which it accepts those of a draft. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import DistinctNumbers, Dtype, Spec, require_distinct
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

VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
UNKNOWN_SERVERS = "no server that is known"
_EAGLE = ("eagle3", "mtp")
_ONE_STEP = ("peagle", "dflash", "dflash2", "lilicorr", "dspark")


@dataclass(frozen=True)
class ServerRule:
    """The rule of one server for drafts of some strategies.

    Attributes:
        flags: what sets it; empty where it is what the server does unasked.
        usual: whether evaluations measure it unasked: all rules without flags, and those of a strategy's own switch.
        note: what else it needs.
    """

    server: str
    strategies: tuple[str, ...]
    flags: str
    rule: AcceptanceRule
    source: str
    note: str = ""
    own_switch: bool = False

    @property
    def usual(self) -> bool:
        return not self.flags or self.own_switch

    def describe(self) -> str:
        """Return the server, with what sets its rule."""
        return f"{self.server} with {self.flags}" if self.flags else self.server


SERVER_RULES = (
    ServerRule(
        VLLM,
        (*_EAGLE, *_ONE_STEP),
        "",
        "greedy_draft",
        "config/speculative.py: draft_sample_method greedy; v1/worker/gpu/spec_decode/speculator.py: sample_draft",
    ),
    ServerRule(
        VLLM,
        ("xpress",),
        "",
        "greedy_draft",
        "v1/worker/gpu/spec_decode/xpress/speculator.py: jacobi_refine_greedy",
        "the draft is greedy whatever the flags say; from 0.33 on",
    ),
    ServerRule(
        VLLM,
        (*_EAGLE, *_ONE_STEP),
        '"draft_sample_method": "probabilistic"',
        "rejection",
        "v1/worker/gpu/spec_decode/rejection_sampler_utils.py: _rejection_kernel",
    ),
    ServerRule(
        VLLM,
        (*_EAGLE, *_ONE_STEP),
        '"draft_sample_method": "probabilistic", "rejection_sample_method": "block"',
        "block",
        "v1/worker/gpu/spec_decode/rejection_sampler_utils.py: USE_BLOCK_VERIFICATION",
        "Model Runner V2; with a greedy draft `block` is `greedy_draft`",
    ),
    ServerRule(
        SGLANG,
        _EAGLE,
        "",
        "greedy_draft",
        "srt/speculative/eagle_utils.py: eagle_sample, tree_speculative_sampling_target_only",
    ),
    ServerRule(
        SGLANG,
        ("mtp",),
        "ROCm",
        "rejection",
        "srt/arg_groups/speculative_hook.py: _should_auto_enable_hip_rejection_sampling",
        "unasked there, for --speculative-algorithm EAGLE and NEXTN",
    ),
    ServerRule(
        SGLANG,
        _EAGLE,
        "--speculative-use-rejection-sampling",
        "rejection",
        "srt/speculative/eagle_utils.py: chain_speculative_sampling_triton",
        "refused for a draft with a reduced vocabulary; --speculative-eagle-topk 1",
    ),
    ServerRule(
        SGLANG,
        _EAGLE,
        "--speculative-use-block-verification",
        "block",
        "srt/arg_groups/speculative_hook.py: handle_speculative_decoding",
        "CUDA and ROCm; it sets --speculative-use-rejection-sampling",
    ),
    ServerRule(
        SGLANG,
        ("dflash", "domino"),
        "",
        "greedy_draft",
        "srt/speculative/dflash_utils.py: compute_dflash_sampling_correct_drafts_and_bonus",
        "no flag changes it",
    ),
    ServerRule(
        SGLANG,
        ("dflash2",),
        "",
        "rejection",
        "srt/speculative/dflash_worker_v2.py: _selector_sampling_accept",
    ),
    ServerRule(
        SGLANG,
        ("lilicorr",),
        "",
        "greedy_draft",
        "srt/speculative/lilicorr_utils.py: resolve_sampling_enabled; srt/environ.py: SGLANG_ENABLE_LILICORR_SAMPLING",
    ),
    ServerRule(
        SGLANG,
        ("lilicorr",),
        "SGLANG_ENABLE_LILICORR_SAMPLING=1",
        "rejection",
        "srt/speculative/lilicorr_utils.py: resolve_sampling_enabled",
        own_switch=True,
    ),
    ServerRule(
        SGLANG,
        ("dspark",),
        "",
        "rejection",
        "srt/speculative/dspark_components/dspark_verify.py: accept_draft_tokens",
    ),
    ServerRule(
        SGLANG,
        ("dspark",),
        "SGLANG_DSPARK_USE_GREEDY_DRAFT=1",
        "greedy_draft",
        "srt/environ.py: SGLANG_DSPARK_USE_GREEDY_DRAFT",
    ),
    ServerRule(
        SGLANG,
        ("dflash2", "lilicorr", "dspark"),
        "--speculative-use-block-verification",
        "block",
        "srt/speculative/dflash_worker_v2.py: _block_verification",
        "CUDA and ROCm; drafts that draw only",
    ),
)


def list_server_rules(strategy: str) -> Iterator[ServerRule]:
    """Yield the rows for drafts of a strategy; none for one that no known server loads."""
    return (row for row in SERVER_RULES if strategy in row.strategies)


def list_usual_rules(strategy: str) -> tuple[AcceptanceRule, ...]:
    """Return the rules that servers have for drafts of a strategy unasked, each once, vLLM's first.

    For a strategy that no known server loads it is `greedy_draft`, the default of both servers.
    """
    found: dict[AcceptanceRule, None] = {row.rule: None for row in list_server_rules(strategy) if row.usual}
    return tuple(found) if found else ("greedy_draft",)


_ENGINES = {"sglang": SGLANG, "vllm": VLLM}


def find_server_rule(engine: str, strategy: str, args: Iterable[str] = ()) -> AcceptanceRule:
    """Return the rule by which a server accepts the drafts of a strategy, with these arguments of its own.

    Args:
        engine: `sglang` or `vllm`.
        args: more arguments of the server; a rule's flags among them set that rule.
    """
    words = " ".join(args)
    rows = [row for row in list_server_rules(strategy) if row.server == _ENGINES[engine]]
    unasked = [row for row in rows if not row.flags]
    asked = [row for row in rows if row.flags and row.flags in words]
    chosen = [*unasked, *asked]
    return chosen[-1].rule if chosen else "greedy_draft"


def describe_servers(strategy: str, rule: AcceptanceRule | None) -> str:
    """Return the servers that accept so: those that do unasked; without one, those that can be told to.

    Args:
        rule: None is greedy decoding, of which nothing is said.
    """
    if rule is None:
        return ""
    rows = [row for row in list_server_rules(strategy) if row.rule == rule]
    unasked = [row for row in rows if not row.flags]
    return ", ".join(row.describe() for row in unasked or rows) or UNKNOWN_SERVERS


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
