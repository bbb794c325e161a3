"""Options of SGLang: how a target is served, and where SGLang is installed on this machine. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import Spec
from draftworks.config.urls import parse_url, parse_urls

RESERVED_ARGUMENTS = (
    *(
        "--model-path",
        "--model",
        "--revision",
        "--tokenizer-path",
        "--host",
        "--port",
        "--device",
        "--dtype",
        "--context-length",
    ),
    *("--tp-size", "--tp", "--tensor-parallel-size", "--dp-size", "--dp", "--data-parallel-size", "--base-gpu-id"),
    *("--mem-fraction-static", "--max-total-tokens", "--chunked-prefill-size", "--forward-hooks"),
    *("--enable-return-aux-hidden-states", "--return-aux-hidden-state-layer-ids"),
)
"""SGLang arguments that are set from the registry. Given again in `args` they would win, and contradict the feature keys."""


_FULL_PRECISION = ("auto", "bfloat16", "bf16")
_QUANTIZING = ("--quantization", "--torchao-config", "--lora-paths", "--enable-lora", "--kv-cache-dtype")


def find_quantizing_args(args: Sequence[str]) -> list[str]:
    """Return those of SGLang's arguments that make it compute with other numbers than the checkpoint's."""
    named = []
    for index, word in enumerate(args):
        name, _, value = word.partition("=")
        plain = name == "--kv-cache-dtype" and (value or "".join(args[index + 1 : index + 2])) in _FULL_PRECISION
        if name in _QUANTIZING and not plain:
            named.append(word)
    return named


class StartedServer(Spec):
    """An SGLang server that Draftworks starts."""

    tp_size: int = Field(default=1, ge=1, description="GPUs that share the target, for each started server.")
    dp_size: int = Field(
        default=1, ge=1, description="Copies of the target in each such server, on `tp_size` GPUs each."
    )
    mem_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of a GPU's memory for weights and cache; None = SGLang's own choice.",
    )
    max_total_tokens: int | None = Field(
        default=None, gt=0, description="Tokens of the cache; None = what memory allows."
    )
    args: list[str] = Field(
        default_factory=list,
        description="More arguments of sglang.launch_server, each a part of what is captured; of a server of yours, those "
        "that change its numbers, such as --quantization.",
    )

    @field_validator("args")
    @classmethod
    def _refuse_reserved(cls, value: list[str]) -> list[str]:
        taken = [word for word in value if word.split("=")[0] in RESERVED_ARGUMENTS]
        if taken:
            raise ValueError(
                f"{', '.join(taken)}: set from other keys of the target, which it would contradict: leave it out"
            )
        return value

    @property
    def gpus(self) -> int:
        """GPUs that one started server uses."""
        return self.tp_size * self.dp_size


class ServerSpec(StartedServer):
    """The SGLang servers of a target for `backend: sglang_server`: one or several, started by Draftworks or external."""

    url: str | None = Field(
        default=None, description="Address of a running server; None = each process starts its own."
    )
    urls: list[str] = Field(default_factory=list, description="Addresses of several running servers, instead of `url`.")
    spool: str | None = Field(
        default=None,
        description="The folder, on this machine, that the servers at `url` or `urls` write hidden states to.",
    )
    mooncake: str | None = Field(
        default=None,
        description="Address file of a Mooncake service through which hidden states come, instead of a folder: for servers "
        "on other hosts.",
    )
    model: str | None = Field(
        default=None, description="Path or hub id of the target on your servers, if it differs from the registry's."
    )
    replicas: int = Field(
        default=1, ge=1, description="Number of servers that each process starts, each on GPUs of its own."
    )
    max_outstanding: int = Field(
        default=256,
        ge=1,
        description="Requests that one of several servers has at a time; others wait, or go to another server.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else parse_url(value)

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, value: list[str]) -> list[str]:
        return parse_urls(value)

    @model_validator(mode="after")
    def _check_external(self) -> ServerSpec:
        if self.url is not None and self.urls:
            raise ValueError("url and urls are alternatives: put every address into urls")
        if self.mooncake is not None and self.spool is not None:
            raise ValueError("spool and mooncake are alternatives: hidden states come by one of them")
        if bool(self.external) != (self.spool is not None) and not (self.external and self.mooncake):
            raise ValueError(
                "url and spool must be given together: hidden states are read from the folder `spool`, or through "
                "`mooncake`"
            )
        if self.external and self.replicas > 1:
            raise ValueError(
                "replicas is the number of servers that Draftworks starts: leave it out if url or urls is given"
            )
        return self

    @property
    def external(self) -> tuple[str, ...]:
        """Addresses of external servers; empty if Draftworks starts its own."""
        return (self.url,) if self.url is not None else tuple(self.urls)


class SGLangSpec(Spec):
    """The installation of SGLang on this machine, and time limits for it."""

    python: str = Field(
        default="../.venv-sglang/bin/python",
        description="Python of the environment with SGLang, relative to the registry.",
    )
    start_timeout_s: float = Field(
        default=900.0, gt=0, allow_inf_nan=True, description="Seconds to wait until a started server is ready."
    )
    request_timeout_s: float = Field(
        default=600.0, gt=0, allow_inf_nan=True, description="Seconds to wait for the answer to a batch."
    )
    attempts: int = Field(default=3, ge=1, description="Attempts for one batch before the run stops.")
    grace_s: float = Field(default=15.0, ge=0, allow_inf_nan=True, description="Seconds between terminate and kill.")
