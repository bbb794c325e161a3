"""Options of capture: the engine that computes the target's hidden states, SGLang's settings, and what is stored. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftworks.config.base import Dtype, Spec
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
    *("--max-model-len", "-tp", "-dp", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--tokenizer"),
    *("--speculative-config", "--kv-transfer-config", "--enable-prefix-caching", "--logprobs-mode", "--max-logprobs"),
)
"""Arguments of SGLang or vLLM that are set from the registry. Given again in `args` they would win, and contradict the
feature keys."""


_FULL_PRECISION = ("auto", "bfloat16", "bf16")
_QUANTIZING = ("--quantization", "-q", "--torchao-config", "--lora-paths", "--enable-lora", "--kv-cache-dtype")


def find_quantizing_args(args: Sequence[str]) -> list[str]:
    """Return those of an engine's arguments that make it compute with other numbers than the checkpoint's."""
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
        description="More arguments of sglang.launch_server or `vllm serve`, each a part of what is captured; of a server of "
        "yours, those that change its numbers, such as --quantization.",
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
    """The servers of a target for `backend: sglang_server` or `vllm_server`: started by Draftworks, or external."""

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


class EngineInstallation(Spec):
    """An engine in a Python of its own on this machine, and time limits for it."""

    python: str
    start_timeout_s: float = Field(
        default=900.0, gt=0, allow_inf_nan=True, description="Seconds to wait until a started server is ready."
    )
    request_timeout_s: float = Field(
        default=600.0, gt=0, allow_inf_nan=True, description="Seconds to wait for the answer to a batch."
    )
    attempts: int = Field(default=3, ge=1, description="Attempts for one batch before the run stops.")
    grace_s: float = Field(default=15.0, ge=0, allow_inf_nan=True, description="Seconds between terminate and kill.")


class SGLangSpec(EngineInstallation):
    """The installation of SGLang on this machine, and time limits for it."""

    python: str = Field(
        default="../.venv-sglang/bin/python",
        description="Python of the environment with SGLang, relative to the registry.",
    )


class VLLMSpec(EngineInstallation):
    """The installation of vLLM on this machine, and time limits for it."""

    python: str = Field(
        default="../.venv-vllm/bin/python",
        description="Python of the environment with vLLM, relative to the registry.",
    )


FeatureStorage = Literal["plain", "fp8", "fp8_taps"]
_SAME_ENGINE = {"sglang": "sglang_server", "vllm_server": "vllm"}
"""Backends that share one engine name in identities: an engine gives the same results in this process and behind HTTP."""


class CustomEngineSpec(Spec):
    """A user's own engine, for `backend: custom`: its entry point, and its name and revision in feature keys."""

    entry_point: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        examples=["mylab.engine:load"],
        description="`module:callable`, importable by this Python; called with target, capture, device and place.",
    )
    engine: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        examples=["mylab-v2"],
        description="Name of the engine, part of every feature's key.",
    )
    numerics: int = Field(
        default=1, ge=1, description="Raise it when the engine's numbers change: features from before no longer count."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options for your entry point, available there as capture.custom.options."
    )


class CaptureSpec(Spec):
    """How the target's hidden states are captured.

    `backend`, `dtype`, `storage` and `compute_dtype` determine their values.
    """

    backend: Literal["hf", "sglang", "sglang_server", "vllm", "vllm_server", "custom"] = Field(
        default="hf",
        description="The engine that runs the target: hf is transformers, sglang and vllm are those in the capturing process, "
        "sglang_server and vllm_server behind HTTP, custom is an engine of yours. A capture that was interrupted and goes on equals the "
        "undisturbed one bit for bit with hf, to rounding with the others.",
    )
    server: ServerSpec = Field(default_factory=ServerSpec)
    custom: CustomEngineSpec | None = Field(default=None, description="The engine of `backend: custom`.")
    dtype: Dtype = Field(
        default="bfloat16", description="Dtype of the stored features; the target runs in `compute_dtype`."
    )
    storage: FeatureStorage = Field(
        default="plain",
        description="How training features are encoded: plain is `dtype`; fp8 is float8_e4m3fn with a scale per token and "
        "stream, half of bfloat16's bytes; fp8_taps is fp8 but for `last`, the teacher's stream. Eval features are always "
        "plain.",
    )
    compute_dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of the target's weights and activations. Left out, it is float32 where the target runs on this "
        "machine's CPU and that has no bfloat16 instructions (AVX512-BF16, AMX).",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if there is one.")
    batch_tokens: int = Field(default=16384, gt=0, description="Tokens, padding included, of one forward pass.")
    in_flight_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens that a process has asked the engine for and not stored yet; None = four batches. One batch "
        "is always allowed.",
    )
    in_flight_mb: int = Field(
        default=4096,
        gt=0,
        description="MB of hidden states in flight, on the way between engine and store; one batch is always allowed.",
    )
    processes: int = Field(default=1, ge=1, description="Ranks that share the work; each writes its own shards.")
    shard_mb: int = Field(default=256, gt=0, description="Size in MB at which a shard is published.")
    budget_gb: float = Field(
        default=100.0,
        gt=0,
        allow_inf_nan=True,
        description="A capture that would store more is refused before it starts.",
    )
    probe_gb: float = Field(
        default=16.0,
        gt=0,
        allow_inf_nan=True,
        description="GB of the target's weights that are read to compare what the engine captures with them; where all its "
        "layers are more, the lowest are compared.",
    )
    allow_unprobed: bool = Field(
        default=False,
        description="Capture also what no such comparison can judge, such as a quantised server; checks name it.",
    )
    max_failed_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="More samples than this without sound features stop the run; others are left out.",
    )

    @model_validator(mode="after")
    def _check_backend(self) -> CaptureSpec:
        if self.storage != "plain" and self.dtype != "bfloat16":
            raise ValueError(
                f"storage {self.storage} is read as bfloat16: expected dtype bfloat16, found {self.dtype}. Remove dtype, or "
                "use storage plain"
            )
        if self.backend == "custom" and self.custom is None:
            raise ValueError("backend custom needs the key custom, with entry_point and engine")
        if self.backend != "custom" and self.custom is not None:
            raise ValueError(f"the key custom is for backend custom, found backend {self.backend}")
        if self.inside is not None and (self.server.external or self.server.replicas > 1):
            raise ValueError(
                f"backend {self.backend} starts one engine in the capturing process: server.url, urls, spool and replicas "
                f"are for backend {self.backend}_server"
            )
        return self

    @property
    def engine(self) -> str:
        """Name of the engine in the identities of results."""
        if self.custom is not None:
            return f"custom:{self.custom.engine}/{self.custom.numerics}"
        return _SAME_ENGINE.get(self.backend, self.backend)

    @property
    def starts_servers(self) -> bool:
        """Whether each process starts servers of its own, which other processes can reach."""
        return self.backend in ("sglang_server", "vllm_server") and not self.server.external

    @property
    def gpus_per_process(self) -> int:
        """GPUs that one process uses, on a machine that has any: its own, or those of the engine that it starts."""
        return self.server.gpus * self.server.replicas if self.starts_engine else 1

    @property
    def software(self) -> Literal["sglang", "vllm"] | None:
        """The software of a Python of its own that runs the target, in whichever process; also its key of the deployment."""
        found = self.backend.partition("_")[0]
        return found if found in ("sglang", "vllm") else None

    @property
    def inside(self) -> Literal["sglang", "vllm"] | None:
        """The software in whose Python the program that loads the engine must run; None for the usual one."""
        return self.software if self.backend == self.software else None

    @property
    def starts_engine(self) -> bool:
        """Whether each process starts the software itself: inside, or as servers."""
        return self.inside is not None or self.starts_servers

    @property
    def engine_args(self) -> list[str]:
        """Additional arguments of the software; part of the identity, since they may change its numbers."""
        return self.server.args if self.software is not None else []

    def to_identity(self) -> dict[str, Any]:
        decided = {"backend": self.engine, "dtype": self.dtype, "compute_dtype": self.compute_dtype}
        decided |= {"args": self.engine_args} if self.engine_args else {}
        return decided | ({} if self.storage == "plain" else {"storage": self.storage})

    def as_plain(self) -> CaptureSpec:
        """Return the settings of features that are stored in `dtype`, as those of eval sets are."""
        return self.model_copy(update={"storage": "plain"})
