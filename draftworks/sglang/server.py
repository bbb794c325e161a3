"""SGLang as a server of ours: its options, and how it is told from another server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError
from draftworks.servers.process import LOOPBACK, ServerProcess
from draftworks.servers.start import read_key
from draftworks.sglang.environment import SGLANG, require_capturing
from draftworks.sglang.hook import format_hook_option
from draftworks.sglang.speculation import Speculation

_SPARE_CONTEXT = 16
"""Positions added to the context: SGLang reserves some, and a sample as long as the target's context has to fit."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of an SGLang server; an Engine in this process takes the same.

    Attributes:
        layer_ids: layers (0-based) whose outputs are captured, ascending; empty for a server that only generates.
        spool: where hidden states are written; see draftworks.handover.spool.
        device: `cpu` or `cuda`.
        dp_size: number of copies of the target in the server, each on `tp_size` GPUs.
        first_gpu: index of the first of the server's GPUs.
        draft: draft to speculate with; None on a server that captures.
        convention: speculative algorithm by whose convention SGLang counts `layer_ids`.
        mooncake: address file of the Mooncake store that hidden states go through instead of the spool.
        host: address of this machine that the server listens on.
        key_file: file with the key that every request has to carry; None for a server without a key.
    """

    model: str
    revision: str | None
    tokenizer: str
    context: int
    dtype: str
    device: str
    layer_ids: tuple[int, ...]
    spool: Path
    tp_size: int = 1
    dp_size: int = 1
    first_gpu: int = 0
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    extra: tuple[str, ...] = ()
    draft: Speculation | None = None
    convention: str = "EAGLE3"
    mooncake: Path | None = None
    host: str = LOOPBACK
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if self.draft is not None and self.layer_ids:
            raise ConfigError("a server captures hidden states or speculates, not both: SGLang has one option for both")

    @property
    def gpus(self) -> int:
        """Number of ranks of the server; on a CPU each rank has one core."""
        return self.tp_size * self.dp_size

    def build_arguments(self, port: int) -> list[str]:
        """Return the arguments of `sglang.launch_server`.

        The prefix cache and chunked prefill are off, because a cached prefix or a chunked prompt loses hidden states.
        """
        values: dict[str, str | int | float | None] = {
            "--model-path": self.model,
            "--revision": self.revision,
            "--tokenizer-path": self.tokenizer,
            "--host": self.host,
            "--port": port,
            "--device": self.device,
            "--dtype": self.dtype,
            "--context-length": self.context + _SPARE_CONTEXT,
            "--tp-size": self.tp_size,
            "--dp-size": self.dp_size if self.dp_size > 1 else None,
            "--base-gpu-id": self.first_gpu if self.device == "cuda" else None,
            "--mem-fraction-static": self.mem_fraction,
            "--max-total-tokens": self.max_total_tokens,
            "--chunked-prefill-size": -1,
        }
        words = [str(word) for name, value in values.items() if value is not None for word in (name, value)]
        purpose = self._build_capture_arguments() if self.draft is None else self.draft.build_arguments(self.device)
        return [*words, "--disable-radix-cache", "--sleep-on-idle", *purpose, *self.extra]

    def build_environment(self) -> dict[str, str]:
        """Return the environment variables that SGLang's processes need in addition to the inherited ones."""
        own = {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        if self.revision is None:
            own["HF_HUB_OFFLINE"] = "1"
        if self.device == "cpu" and self.gpus > 1:
            own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.gpus)))  # one core for each rank
        return own if self.draft is None else own | self.draft.build_environment(self.device)

    def read_key(self) -> str | None:
        """Return the key that requests have to carry; None if there is none."""
        return None if self.key_file is None else read_key(self.key_file)

    def _build_capture_arguments(self) -> list[str]:
        if not self.layer_ids:
            return []
        capture = ["--enable-return-aux-hidden-states", "--speculative-algorithm", self.convention]  # without a draft
        layers = ["--return-aux-hidden-state-layer-ids", *map(str, self.layer_ids)]
        # A replayed CUDA graph calls no hook, and hidden states are captured in the prefill.
        graphs = ["--disable-prefill-cuda-graph"] if self.device == "cuda" else []
        return [*capture, *layers, *graphs, "--forward-hooks", format_hook_option(self.spool, self.mooncake)]


class SGLangServer(ServerProcess[ServerOptions]):
    """One SGLang server of ours."""

    SOFTWARE = SGLANG
    MODULE = "sglang.launch_server"
    INFO_PATH = "/server_info"

    def _prepare(self) -> None:
        if self._options.layer_ids:
            require_capturing(self.version, f"{self._python}")
        self._options.spool.mkdir(parents=True, exist_ok=True)

    def _expect(self) -> Mapping[str, Any]:
        """Return the model and, of a server that captures, its hook: another server of the model has another spool."""
        expected: dict[str, Any] = {"model_path": self._options.model}
        if self._options.layer_ids:
            expected["forward_hooks"] = json.loads(format_hook_option(self._options.spool, self._options.mooncake))
        return expected
