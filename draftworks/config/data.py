"""Options of a target's data: mixes and weights of slices, served prompts, answers of the target. Torch-free."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import EnvironmentName, Spec
from draftworks.config.decoding import Decoding
from draftworks.config.urls import parse_urls, require_api_root
from draftworks.storage.names import require_name

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
Masked = Literal["email", "phone", "ip", "secret"]


class RedactionSpec(Spec):
    """A hook that removes what must not be stored: a command, or a function that runs in a process of its own."""

    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments, run without a shell in the registry's folder: rows as JSONL on stdin, as many "
        "lines on stdout.",
    )
    function: str | None = Field(
        default=None, description="module:function of an installed package: a list of rows to a list as long."
    )
    timeout_s: float = Field(default=300.0, gt=0, le=86_400, description="Time limit of one call.")
    rows_per_call: int = Field(default=1000, ge=1, le=100_000, description="Rows given to one call at most.")

    @field_validator("function")
    @classmethod
    def _check_function(cls, value: str | None) -> str | None:
        if value is not None and not FUNCTION.fullmatch(value):
            raise ValueError(f"expected module:function, found {value!r}")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> RedactionSpec:
        if (self.command is None) == (self.function is None):
            raise ValueError("redaction is either a command or a function: give one of them")
        return self

    def to_identity(self) -> dict[str, Any]:
        return self.model_dump(include={"command", "function"})


class ServedSpec(Spec):
    """How logged requests become prompts."""

    mask: list[Masked] = Field(
        default=["email", "secret"],
        description="Kinds of text that are replaced by a placeholder such as [EMAIL], before `redaction`.",
    )
    redaction: RedactionSpec | None = Field(default=None, description="Your own redaction; default: none but `mask`.")
    on_secret: Literal["drop", "refuse"] = Field(
        default="drop",
        description="A row that still holds a known kind of secret after redaction is left out and counted, or ends the run.",
    )
    source_field: str | None = Field(
        default=None,
        min_length=1,
        description="Field of a row, with dots (metadata.app), whose value is the slice column `source`; default: the data "
        "set's name.",
    )
    max_rows: int = Field(default=1_000_000, ge=1, description="More rows than this are refused.")
    max_line_mb: float = Field(default=8.0, gt=0, le=64, description="Longer lines are rejected without being held.")

    def to_identity(self) -> dict[str, Any]:
        """Return the options that determine the prompts; limits do not."""
        redaction = None if self.redaction is None else self.redaction.to_identity()
        return {"mask": sorted(set(self.mask)), "redaction": redaction, "source_field": self.source_field} | {
            "on_secret": self.on_secret
        }


class EndpointSpec(Spec):
    """An OpenAI-compatible server that runs the target, called at `/chat/completions`: SGLang, vLLM, a gateway.

    `server` names the fields that it supports beyond OpenAI's. Servers ignore unknown fields silently, so response options
    without a supported field are refused.
    """

    base_urls: list[str] = Field(
        min_length=1,
        description="Base URLs including `/v1`; several servers run the same target and share the work.",
    )
    model: str | None = Field(default=None, description="Name of the target on the server; None = as in the registry.")
    server: Literal["sglang", "vllm", "openai"] = Field(
        description="sglang and vllm take top_k, repetition_penalty and thinking; openai is any other: it takes none of them."
    )
    token_ids: bool = Field(
        default=True,
        description="The server returns token ids; false = its text, tokenized again. openai returns text only.",
    )
    api_key_env: EnvironmentName | None = Field(
        default=None, description="Name of the environment variable that holds the API key."
    )
    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=True, description="Seconds to wait for an answer.")
    attempts: int = Field(default=5, ge=1, description="Number of requests for one answer before the run stops.")
    max_outstanding: int = Field(default=64, ge=1, description="Requests that one server has at a time; others wait.")

    @field_validator("base_urls")
    @classmethod
    def _check_urls(cls, value: list[str]) -> list[str]:
        return [require_api_root(url) for url in parse_urls(value)]

    @model_validator(mode="after")
    def _check_token_ids(self) -> EndpointSpec:
        if self.server == "openai" and self.token_ids:
            raise ValueError(
                "server openai returns no token ids: set token_ids to false; labels are then the answer's text, tokenized again"
            )
        return self

    def to_identity(self) -> dict[str, Any]:
        """Return the options that determine the answers; addresses, time limits and numbers of attempts do not."""
        return self.model_dump(include={"model", "server", "token_ids"})


class AnswersSampling(Spec):
    """How a target's stored answers were written: 0 is greedily, without other values."""

    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_k: int | None = Field(default=None, ge=1, description="null: no limit.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="1 = no limit.")

    def writes_as(self, decoding: Decoding) -> bool:
        """Return whether a server that decodes so writes answers of this distribution."""
        if self.temperature == 0 or decoding.temperature == 0:
            return self.temperature == decoding.temperature
        ours, theirs = (
            (self.temperature, self.top_k, self.top_p),
            (decoding.temperature, decoding.top_k, decoding.top_p),
        )
        return ours == theirs

    def describe(self) -> str:
        """Return it in words: `greedily`, `at temperature 0.7, top-p 0.9`."""
        if self.temperature == 0:
            return "greedily"
        return f"at {Decoding(self.temperature, 'rejection', self.top_k, self.top_p).describe()}"


class ResponseSpec(Spec):
    """Source of the answers. A draft learns the *target's* own answers, so `regenerate` is the default."""

    mode: Literal["regenerate", "passthrough"] = Field(
        default="regenerate", description="The target answers the prompts, or the data's own answers are taken."
    )
    endpoint: EndpointSpec | None = Field(
        default=None,
        description="An OpenAI-compatible server that generates the answers, instead of the engine of `capture`.",
    )
    thinking: bool | None = Field(
        default=None,
        description="Whether the target thinks before it answers, for chat templates with such a switch; None = theirs.",
    )
    max_new_tokens: int = Field(
        default=512, gt=0, description="Largest number of tokens of one answer, its thoughts included."
    )
    continue_after_cut: bool = Field(
        default=True,
        description="Go on with the next question after an answer that max_new_tokens cut, as a server's clients do; false = end "
        "the conversation there.",
    )
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the smallest set of tokens with this mass; 1 = all."
    )
    top_k: int = Field(default=0, ge=0, description="0 = no limit.")
    repetition_penalty: float = Field(default=1.0, gt=0, description="Multiplicative, as in transformers; 1 = off.")
    seed: int = Field(default=0, description="Seed of sampling.")
    batch_size: int = Field(
        default=64,
        ge=1,
        description="Most sequences decoded together, of each server if there are several; not part of any identity. Engine hf "
        "decodes fewer where their keys and values would take over 0.3 of the weights' bytes, or half of a GPU's free memory.",
    )

    @model_validator(mode="after")
    def _check_endpoint(self) -> ResponseSpec:
        if self.endpoint is None:
            return self
        if self.mode == "passthrough":
            raise ValueError("mode passthrough generates no answers: leave the endpoint out, or set mode to regenerate")
        if self.endpoint.server == "openai":
            beyond = {"top_k": 0, "repetition_penalty": 1.0, "thinking": None}
            unsupported = [name for name, default in beyond.items() if getattr(self, name) != default]
            if unsupported:
                raise ValueError(
                    f"OpenAI's interface has no field for {', '.join(unsupported)}, and such a server would ignore it "
                    "silently: leave it out, or set endpoint.server to what runs there"
                )
        return self

    def to_identity(self) -> dict[str, Any]:
        """Return the options that determine the answers. Options added later are included only if they are set, so that the
        identities of earlier results stay the same.
        """
        decided = self.model_dump(exclude={"batch_size", "endpoint", "thinking", "continue_after_cut"})
        if self.endpoint is not None:
            decided["endpoint"] = self.endpoint.to_identity()
        if self.thinking is not None:
            decided["thinking"] = self.thinking
        if not self.continue_after_cut:
            decided["continue_after_cut"] = False
        return decided


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
