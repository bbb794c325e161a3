"""vLLM as a server of ours: its options, and how it is told from another server."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftworks
from draftworks.servers.process import LOOPBACK, ServerProcess
from draftworks.vllm.environment import VLLM


@dataclass(frozen=True)
class VLLMServerOptions:
    """Options of a vLLM server.

    Attributes:
        name: what requests call the model; one of no other server tells this one from it.
        device: `cpu` or `cuda`; vLLM takes what its build is for.
        context: tokens of a prompt and its answer.
        speculative: `--speculative-config`; None for a server that does not speculate.
        kv_transfer: `--kv-transfer-config`, of a server that captures.
        max_requests: requests that it runs together; None leaves it to vLLM.
        first_gpu: index of the first of the server's GPUs, of which it sees its own alone.
        mem_fraction: share of a GPU's memory; on a CPU `cache_gb` is the size of the KV cache.
        counts_requests: whether answers have the counters of their own request, which needs `speculative`.
        host: address of this machine that the server listens on.
        key_file: file with the key that every request has to carry; None for a server without a key.
    """

    model: str
    revision: str | None
    tokenizer: str
    name: str
    context: int
    dtype: str
    device: str
    speculative: Mapping[str, Any] | None = None
    kv_transfer: Mapping[str, Any] | None = None
    max_requests: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    mem_fraction: float | None = None
    cache_gb: int = 1
    counts_requests: bool = False
    first_gpu: int = 0
    seed: int = 0
    extra: tuple[str, ...] = ()
    host: str = LOOPBACK
    key_file: Path | None = None

    def build_arguments(self, port: int) -> list[str]:
        """Return the arguments of vLLM's API server."""
        own = {"--served-model-name": self.name, "--host": self.host, "--port": port}
        counting = ["--per-request-spec-decode-metrics", "detailed"] if self.counts_requests else []
        return [*(str(word) for pair in own.items() for word in pair), *counting, *self.build_engine_arguments()]

    def build_engine_arguments(self) -> list[str]:
        """Return the arguments of vLLM's engine, in a server or in this process.

        The prefix cache is off: what it holds is not computed again, so that neither the time nor the hidden states are
        those of the request.
        """
        values: dict[str, str | int | float | None] = {
            "--model": self.model,
            "--revision": self.revision,
            "--tokenizer": self.tokenizer,
            "--dtype": self.dtype,
            "--max-model-len": self.context,
            "--max-num-seqs": self.max_requests,
            "--tensor-parallel-size": self.tp_size if self.tp_size > 1 else None,
            "--data-parallel-size": self.dp_size if self.dp_size > 1 else None,
            "--gpu-memory-utilization": self.mem_fraction if self.device == "cuda" else None,
            "--seed": self.seed,
            "--speculative-config": _format_json(self.speculative),
            "--kv-transfer-config": _format_json(self.kv_transfer),
        }
        words = [str(word) for name, value in values.items() if value is not None for word in (name, value)]
        eager = ["--enforce-eager"] if self.device == "cpu" else []  # compiling takes longer than the little work there
        # Without it the model's generation_config.json would set what a request leaves open, such as penalties.
        plain = ["--generation-config", "vllm"]
        return [*words, *plain, "--no-enable-prefix-caching", *eager, *self.extra]

    def build_environment(self) -> dict[str, str]:
        """Return the environment variables that vLLM's processes need in addition to the inherited ones."""
        own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        if self.revision is None:
            own["HF_HUB_OFFLINE"] = "1"
        if self.device == "cpu":
            return own | {"VLLM_CPU_KVCACHE_SPACE": str(self.cache_gb)}
        gpus = range(self.first_gpu, self.first_gpu + self.tp_size * self.dp_size)
        return own | ({"CUDA_VISIBLE_DEVICES": pick_devices(gpus)} if self.first_gpu else {})


class VLLMServer(ServerProcess[VLLMServerOptions]):
    """One vLLM server of ours."""

    SOFTWARE = VLLM
    MODULE = "vllm.entrypoints.openai.api_server"
    INFO_PATH = "/v1/models"

    def _expect(self) -> Mapping[str, Any]:
        return {"id": self._options.name, "root": self._options.model}

    def _read_info(self, answer: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
        models = answer.get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        return super()._read_info(first, names)


def _format_json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)


def pick_devices(gpus: Sequence[int]) -> str:
    """Return the CUDA_VISIBLE_DEVICES of a process that has these of the GPUs that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else []
    return ",".join(names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus)


def describe_command(options: VLLMServerOptions, port: int = 8000) -> str:
    """Return the shell command of a server with these options; what it captures is written by this package."""
    environment = [f"{name}={value}" for name, value in sorted(options.build_environment().items())]
    package = f"PYTHONPATH={shlex.quote(str(Path(draftworks.__file__).resolve().parents[1]))}"
    return " ".join(
        [package, *environment, "vllm", "serve", options.model, shlex.join(options.build_arguments(port)[2:])]
    )
