"""The backends `vllm` and `vllm_server`: vLLM runs the target, a connector inside it hands the hidden states over.

vLLM keeps the state after the last layer before the final norm. Here the target's own norm is applied, so that `last` is
what the head reads, as with every other engine.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftworks.capture.engine import derive_seed
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.parts_engine import AnsweredPart, Losses, PartsEngine
from draftworks.config.capture import VLLMSpec
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import EngineError
from draftworks.handover.spool import Part
from draftworks.storage.identity import EngineIdentity
from draftworks.vllm.embedded import EmbeddedVLLM
from draftworks.vllm.environment import VLLM
from draftworks.vllm.server import VLLMServerOptions

log = logging.getLogger(__name__)


class VLLMEngine(PartsEngine):
    """A target engine that runs in vLLM.

    A seed fixes a sampled answer only where vLLM puts the same requests into a batch.

    Args:
        load_norm: reads the target's final norm, (S, H) to (S, H), once and only where it captures.
    """

    backend = "vllm"
    software = VLLM
    losses = Losses(
        nothing="its connector. Check that it is loaded (--kv-transfer-config)", cached="--no-enable-prefix-caching"
    )

    def __init__(
        self,
        target: TargetFiles,
        identity: EngineIdentity,
        host: EngineHost[Any],
        head: Callable[[], Tensor] | None = None,
        load_norm: Callable[[], Callable[[Tensor], Tensor]] | None = None,
        attempts: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(target, identity, host, head, attempts, dtype)
        self._load_norm = load_norm
        self._norm: Callable[[Tensor], Tensor] | None = None

    def _make_member(self, host: EngineHost[Any]) -> VLLMEngine:
        return VLLMEngine(self._target, self.identity, host, self._read_head, self._load_norm, 1, self._dtype)

    @torch.inference_mode()
    def _read_last(self, part: Part) -> Tensor:
        if self._norm is None:
            if self._load_norm is None:
                raise EngineError("this engine was loaded to generate, without the target's final norm")
            self._norm = self._load_norm()
        return self._norm(part.last)

    def _read_logits(self, answered: AnsweredPart) -> Tensor:
        if answered.answer.logits is None:
            raise EngineError("vLLM returned no logits: expected them in the answer to a request that asks for them")
        return torch.tensor(answered.answer.logits)

    def _build_prefill(self, with_logits: bool) -> dict[str, Any]:
        asked = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        return asked | ({"logprobs": -1} if with_logits else {})

    def _build_sampling(
        self, sampling: ResponseSpec, seed_key: str, room: int, end_ids: Collection[int]
    ) -> dict[str, Any]:
        parameters = {
            "max_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": sorted(end_ids),
            "detokenize": False,
        }
        return parameters | ({"seed": derive_seed(sampling.seed, seed_key)} if sampling.temperature > 0 else {})


class EmbeddedVLLMHost(EngineHost[EmbeddedVLLM]):
    """vLLM in this process, started by the constructor and stopped by `close`.

    Args:
        spool: folder that hidden states go through; removed by `close`.
        layer_ids: layers whose outputs it captures, ascending; -1 is the embeddings.
    """

    def __init__(
        self, options: VLLMServerOptions, vllm: VLLMSpec, spool: Path, layer_ids: tuple[int, ...], in_process: bool
    ) -> None:
        self._options = options
        self._vllm = vllm
        self._in_process = in_process
        self.spool = spool
        self.layer_ids = layer_ids
        self.version = VLLM.require_here()
        self.client = self._start()

    def require_running(self) -> None:
        self.client.require_sound()

    def revive(self, error: EngineError) -> None:
        log.warning("%s\nvLLM is restarted", error)
        self.client.close()
        self.client = self._start()

    def close(self) -> None:
        self.client.close()
        shutil.rmtree(self.spool, ignore_errors=True)

    def _start(self) -> EmbeddedVLLM:
        shutil.rmtree(self.spool, ignore_errors=True)
        self.spool.mkdir(parents=True)
        log.info("starting vLLM in this process")
        timeouts = (self._vllm.start_timeout_s, self._vllm.request_timeout_s, self._vllm.grace_s)
        client = EmbeddedVLLM(self._options, *timeouts, in_process=self._in_process)
        client.start()
        return client
