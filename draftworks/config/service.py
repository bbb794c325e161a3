"""Options of service and serving: the rule of promotion, the hook, gates of reports, fp8, comparisons. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import DistinctNumbers, Dtype, EnvironmentName, Spec, require_distinct
from draftworks.config.capture import StartedServer
from draftworks.config.urls import parse_url, require_private, require_root
from draftworks.storage.http_call import is_loopback
from draftworks.storage.words import suggest_or_list

LEAST_PROMPTS = 120
"""Prompts from which on few promotions and decisions are wrong, whatever the data: see docs/benchmarks.md."""


LEAST_READINGS = 12
"""Windows of a server's counters below which they have no interval; as `draftworks.production.readings.LEAST_WINDOWS`."""


class HookSpec(Spec):
    """How servers are told that another draft is in service: a command, or a request to a URL."""

    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments; run without a shell, with the record as JSON on its stdin.",
    )
    url: str | None = Field(
        default=None, description="Address that the record is posted to as JSON: https, or http on this machine."
    )
    api_key_env: EnvironmentName | None = Field(
        default=None, description="Name of the environment variable with a key, sent to `url` as a bearer token."
    )
    timeout_s: float = Field(default=60.0, gt=0, le=3600, description="Time limit of one attempt.")
    attempts: int = Field(default=3, ge=1, le=20, description="How often it is tried at most.")
    pause_s: float = Field(default=5.0, ge=0, le=600, description="Pause before the second attempt; doubled after it.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else require_private(parse_url(value))

    @model_validator(mode="after")
    def _check_one(self) -> HookSpec:
        if (self.command is None) == (self.url is None):
            raise ValueError("a hook is either a command or a url: give one of them")
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env is sent to a url: a command reads its environment by itself")
        return self


class SwapSpec(Spec):
    """A vLLM on this machine that runs, and is given each draft that goes into service, see `draftworks exchange`."""

    url: str = Field(description="Address of vLLM, on this machine: its development mode asks for no key.")
    folder: str = Field(description="The draft's folder that vLLM was started with, an absolute path; replaced.")
    strategy: str | None = Field(
        default=None,
        description="Strategy whose draft it serves, where the target has several; of others it is not told.",
    )
    format: str | None = Field(
        default=None, description="Export format, where there are several: the one that is served."
    )
    requests: int = Field(
        default=200, ge=1, description="Answers of the former draft, and then of the new one, that are compared."
    )
    seconds: float = Field(
        default=900.0, gt=0, le=86400, description="Longest time for either; with too few answers it is undecided."
    )
    every_s: float = Field(
        default=5.0,
        ge=0.05,
        le=600,
        description="Pause between two readings of the counters: 12 of them or more count.",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=3600,
        description="Time limit of each call of the exchange; requests that run are answered first.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        url = require_root(parse_url(value))
        if not is_loopback(url):
            raise ValueError("expected an address of this machine, such as http://127.0.0.1:8000")
        return url

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError("expected an absolute path, that of the folder that vLLM was started with")
        return value

    @model_validator(mode="after")
    def _check_time(self) -> SwapSpec:
        if self.seconds < LEAST_READINGS * self.every_s:
            raise ValueError(
                f"seconds {self.seconds:g} leaves no room for {LEAST_READINGS} readings every_s {self.every_s:g}: nothing "
                "could be decided"
            )
        return self


class ServiceSpec(Spec):
    """The rule by which a draft replaces the one in service, and who is told."""

    margin: float = Field(
        default=0.03,
        ge=0,
        description="Accepted tokens per pass (walk, rung 3) that a new draft may have less than the best one that was in "
        "service for these weights: the lower bound of the paired 95% interval has to be at least minus this.",
    )
    margins: dict[str, float] = Field(
        default_factory=dict, description="Tighter margins of single eval sets, by name; none is wider than `margin`."
    )
    least_prompts: int = Field(
        default=LEAST_PROMPTS,
        ge=1,
        description="Prompts that two drafts have to share on an eval set; with fewer it is undecided. Below the default a "
        "draft that lost a part of the traffic is promoted too often.",
    )
    slice_margin: float = Field(
        default=0.1,
        ge=0,
        description="Accepted tokens per pass that a slice (language, length of the prompt, thinking, source, and "
        "`evaluation.slices`) with 20 shared prompts may lose; one that clearly loses more holds the draft back.",
    )
    automatic: bool = Field(
        default=True,
        description="Put into service what the rule accepts. false: it is marked as accepted, and `draftworks promote` does it.",
    )
    hook: HookSpec | None = Field(default=None, description="Tells servers; default: nobody is told.")
    bundle: bool = Field(
        default=False,
        description="Promotions make a bundle of the draft, and the record names its digest and its folder: one object with "
        "files, flags by server, promised tokens by slice, licences and lineage.",
    )
    swap: SwapSpec | None = Field(
        default=None,
        description="A running vLLM loads what goes into service, without a restart, and goes back if it accepts clearly less: "
        "by more than `margin`.",
    )

    @model_validator(mode="after")
    def _check_margins(self) -> ServiceSpec:
        for name, margin in self.margins.items():
            if margin < 0:
                raise ValueError(f"margins.{name}: expected 0 or more, found {margin:g}")
            if margin > self.margin:
                raise ValueError(
                    f"margins.{name} {margin:g} contradicts margin {self.margin:g}, which is the most that any eval set may "
                    "lose: raise margin, or lower the other"
                )
        return self

    def require_eval_sets(self, names: Sequence[str]) -> None:
        """Raise ValueError if there is a margin for an eval set that the target is not measured on."""
        unknown = sorted(self.margins.keys() - set(names))
        if unknown:
            raise ValueError(
                f"service.margins.{unknown[0]}: the target is not measured on that eval set; "
                f"{suggest_or_list(unknown[0], names)}"
            )

    def require_strategies(self, names: Collection[str]) -> None:
        """Raise ValueError if it is not clear whose draft a running server loads."""
        if self.swap is None:
            return
        if self.swap.strategy is None and len(names) > 1:
            raise ValueError(
                f"service.swap.strategy: the server serves the draft of one strategy, and the target has {', '.join(names)}: "
                "name it"
            )
        if self.swap.strategy is not None and self.swap.strategy not in names:
            raise ValueError(
                f"service.swap.strategy: the target has no strategy {self.swap.strategy}; "
                f"{suggest_or_list(self.swap.strategy, names)}"
            )

    def select_margin(self, eval_set: str) -> float:
        return self.margins.get(eval_set, self.margin)


ServingEngine = Literal["sglang", "vllm"]


class ServingSpec(Spec):
    """Rung 6 of the acceptance ladder: the exported draft in live servers, started for the measurement or running."""

    engines: list[ServingEngine] = Field(
        default=["sglang"],
        min_length=1,
        description="Servers to measure in, each by itself, and shown side by side: sglang, vllm.",
    )
    urls: dict[ServingEngine, str] = Field(
        default_factory=dict,
        description="Addresses of running servers that speculate with this draft, by engine; others are started.",
    )
    temperatures: DistinctNumbers = Field(
        default=[],
        description="Also answers sampled at these temperatures, by the server's own rule of acceptance, beside rung 4 of "
        "the same decoding (`evaluation.loop`). Greedy answers are always measured.",
    )

    prompts: int = Field(default=0, ge=0, description="Held-out samples to answer; 0 leaves the rung out.")
    concurrency: int = Field(default=8, ge=1, description="Requests at a time.")
    compute_dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of target and draft in the server. Left out, it is float32 on a CPU, where SGLang takes nothing else.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if there is one.")
    format: str | None = Field(
        default=None, description="Export format to serve where the engine loads it; default the first that it loads."
    )
    tolerance: float = Field(
        default=0.05,
        ge=0,
        description="Difference from the walk (rung 3) that is no warning, as a share of its tokens per pass.",
    )
    server: StartedServer = Field(default_factory=StartedServer)

    @field_validator("engines")
    @classmethod
    def _check_engines(cls, value: list[ServingEngine]) -> list[ServingEngine]:
        require_distinct([str(engine) for engine in value])
        return value

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, value: dict[ServingEngine, str]) -> dict[ServingEngine, str]:
        return {engine: parse_url(url) for engine, url in value.items()}

    @field_validator("temperatures")
    @classmethod
    def _check_temperatures(cls, value: list[float]) -> list[float]:
        if any(temperature <= 0 for temperature in value):
            raise ValueError(f"expected temperatures above 0 (greedy answers are always measured), found {value}")
        return value

    @model_validator(mode="after")
    def _check_addresses(self) -> ServingSpec:
        unused = [engine for engine in self.urls if engine not in self.engines]
        if unused:
            raise ValueError(f"urls.{unused[0]}: engines has no {unused[0]}: add it there, or leave the address out")
        return self

    def starts(self, engine: ServingEngine) -> bool:
        """Whether a server of this engine is started for the measurement."""
        return bool(self.prompts) and engine in self.engines and engine not in self.urls

    def to_identity(self) -> dict[str, Any]:
        """Return the options that determine the figures: those of one SGLang server, and what differs from it."""
        decided = self.model_dump(exclude={"device", "engines", "urls", "temperatures"})
        decided |= {} if self.engines == ["sglang"] else {"engines": list(self.engines)}
        decided |= {"urls": dict(self.urls)} if self.urls else {}
        return decided | ({"temperatures": list(self.temperatures)} if self.temperatures else {})


class DataSpec(Spec):
    """How conversations become supervised tokens."""

    only_last_turn: bool = Field(default=False, description="Supervise only the last assistant turn.")
    held_out_share: float = Field(
        default=0.1, gt=0, lt=1, description="Share of conversations kept for the eval set `heldout`."
    )
    max_conversations: int | None = Field(
        default=None, gt=0, description="Number of conversations to use, chosen by hash; None = all."
    )
    max_rejected_share: float = Field(
        default=0.05, ge=0, le=1, description="Share of rejected data rows above which the run stops."
    )
    min_supervised_share: float = Field(
        default=0.02, ge=0, le=1, description="Share of supervised tokens below which the run stops."
    )
    workers: int = Field(default=2, ge=1, description="Tokenizer processes.")

    def to_identity(self) -> dict[str, Any]:
        return self.model_dump(exclude={"workers"})


Outcome = Literal["warn", "error"]


class GateSpec(Spec):
    """Effect of each failed check: `warn` reports it and continues, `error` fails the run and prevents the export.

    The keys `fp8_...` are of the gate before training on features in fp8 (`capture.storage`).

    Only checks that are a matter of judgement are listed. Checks whose failure means a defect (features that are not the
    target's, exports that do not compute the draft's logits) always fail the run.
    """

    loss_falls: Outcome = Field(default="error", description="Training loss ends below where it began.")
    beats_baselines: Outcome = Field(
        default="warn",
        description="The target accepts more of the draft than of what costs nothing: prompt lookup, suffix decoding, bigrams.",
    )
    not_worse: Outcome = Field(default="warn", description="The draft accepts no less than the one that it replaces.")
    agrees_with_walk: Outcome = Field(default="warn", description="The live server accepts as many tokens as the walk.")
    answers_finished: Outcome = Field(
        default="warn", description="Most answers end before max_new_tokens cuts them off."
    )
    fp8_max_loss: float = Field(
        default=0.02,
        gt=0,
        lt=1,
        description="Features in fp8 are refused unless the upper bound of what drafts lose of their accepted tokens per pass "
        "(rung 3), as a share, is at most this.",
    )
    fp8_samples: int = Field(default=2000, ge=1, description="Training samples of that comparison, chosen by hash.")
    fp8_steps: int = Field(default=500, ge=1, description="Optimizer steps of each of its trainings.")
    fp8_seeds: int = Field(
        default=2, ge=1, description="Its seeds; each trains a draft on plain features and one on fp8."
    )
    fp8_ungated: bool = Field(
        default=False, description="Train on features in fp8 although the comparison has not passed, or was not made."
    )


class ComparisonSpec(Spec):
    """Trainings of `compare_thinking`: on answers with thinking on, off, and on both, for each strategy."""

    tokens: int = Field(
        default=1_000_000, ge=1, description="Tokens of each training set, at most; all have those of the smaller kind."
    )
    steps: int = Field(default=500, ge=1, description="Optimizer steps of each training.")
    seeds: int = Field(default=2, ge=1, description="Seeds; each trains three drafts of a strategy.")
