"""Options of the answers that a draft is trained on: their source, and how they are generated. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import EnvironmentName, Spec
from draftworks.config.decoding import Decoding
from draftworks.config.urls import parse_urls


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
        return parse_urls(value)

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
        description="Sequences decoded together, of each server if there are several; not part of any identity.",
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
