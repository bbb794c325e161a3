"""Options of putting drafts into service: margins of the rule, whether it acts by itself, the hook. Torch-free."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import EnvironmentName, Spec
from draftworks.config.urls import parse_url
from draftworks.storage.suggestions import suggest_or_list

LEAST_PROMPTS = 120
"""Prompts from which on few promotions and decisions are wrong, whatever the data: see docs/benchmarks.md."""


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
        if value is None:
            return None
        url = parse_url(value)
        if urlsplit(url).scheme != "https" and not is_loopback(url):
            raise ValueError("http is for this machine alone (127.0.0.1, localhost): use https")
        return url

    @model_validator(mode="after")
    def _check_one(self) -> HookSpec:
        if (self.command is None) == (self.url is None):
            raise ValueError("a hook is either a command or a url: give one of them")
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env is sent to a url: a command reads its environment by itself")
        return self


def is_loopback(url: str) -> bool:
    """Whether the host of an address is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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

    def select_margin(self, eval_set: str) -> float:
        return self.margins.get(eval_set, self.margin)
