"""What a user says of SGLang: how a target is served, and where SGLang is on this machine. Torch-free."""

from __future__ import annotations

from pydantic import Field, model_validator

from draftworks.spec_base import Spec


class ServerSpec(Spec):
    """The SGLang server that runs a target for `backend: sglang_server`: started by us, or one of yours by its `url`."""

    url: str | None = Field(None, description="Of a server that is running; None = each process starts its own.")
    spool: str | None = Field(
        None, description="The folder, on this machine, that the server at `url` writes hidden states to."
    )
    model: str | None = Field(
        None, description="Path or hub id under which the server at `url` knows the target, if it is another there."
    )
    tp_size: int = Field(1, ge=1, description="GPUs that share the target, of each server we start.")
    mem_fraction: float | None = Field(
        None, gt=0, lt=1, description="Of a GPU's memory, for weights and cache; None = SGLang's own choice."
    )
    max_total_tokens: int | None = Field(None, gt=0, description="Tokens of the cache; None = what memory allows.")
    args: list[str] = Field(default_factory=list, description="More arguments of sglang.launch_server.")

    @model_validator(mode="after")
    def _url_with_spool(self) -> ServerSpec:
        if (self.url is None) != (self.spool is None):
            raise ValueError("url and spool go together: without the folder its hidden states cannot be had")
        return self


class SGLangSpec(Spec):
    """Where SGLang is on this machine, and how patient we are with it."""

    python: str = Field(
        "../.venv-sglang/bin/python", description="Of the environment with SGLang, relative to the registry."
    )
    start_timeout_s: float = Field(900.0, gt=0, description="Until a server we started has to be ready.")
    request_timeout_s: float = Field(600.0, gt=0, description="Until it has to have answered a batch.")
    attempts: int = Field(3, ge=1, description="How often a batch is tried before the run stops.")
    grace_s: float = Field(15.0, ge=0, description="Seconds between terminate and kill.")
