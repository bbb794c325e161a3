"""The backends `sglang` and `sglang_server`: SGLang runs the target, its forward hook hands the hidden states over."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from draftworks.capture.engine import derive_seed
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.parts_engine import AnsweredPart, Losses, PartsEngine
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import EngineError
from draftworks.handover.spool import Part
from draftworks.sglang.environment import SGLANG
from draftworks.storage.identity import EngineIdentity, LayerTap

PREFILL_ONLY = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
"""Sampling parameters of a capture: SGLang requires at least one new token, which costs no second forward pass."""
EMBEDDINGS = LayerTap(0)
LOSSES = Losses(
    nothing="its forward hook. Check that the hook is loaded",
    cached="--disable-radix-cache",
    chunks="Start the server with --chunked-prefill-size -1",
)


class SGLangEngine(PartsEngine):
    """A target engine that runs in SGLang.

    A seed fixes a sampled answer only on a server with --enable-deterministic-inference, and SGLang's repetition penalty
    ignores the prompt.

    Args:
        embedding: reads the target's input matrix (V, H), once and only for the tap hf0: SGLang returns no embeddings.
    """

    backend = "sglang"
    software = SGLANG
    losses = LOSSES

    def __init__(
        self,
        target: TargetFiles,
        identity: EngineIdentity,
        host: EngineHost[Any],
        head: Callable[[], Tensor] | None = None,
        embedding: Callable[[], Tensor] | None = None,
        attempts: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(target, identity, host, head, attempts, dtype)
        self._read_embedding = embedding
        self._embedding: Tensor | None = None

    def _make_member(self, host: EngineHost[Any]) -> SGLangEngine:
        readers = (self._read_head, self._read_embedding)
        return SGLangEngine(self._target, self.identity, host, *readers, 1, self._dtype)

    def _choose_reader(self, tap: LayerTap) -> Callable[[Part], Tensor]:
        return self._look_up_embeddings if tap == EMBEDDINGS else super()._choose_reader(tap)

    def _look_up_embeddings(self, part: Part) -> Tensor:
        if self._embedding is None:
            if self._read_embedding is None:
                raise EngineError("this engine was loaded without the target's embeddings, and has no tap hf0")
            self._embedding = self._read_embedding()
        return self._embedding[part.input_ids].to(part.last.dtype)  # (S,) to (S, H)

    def _read_logits(self, answered: AnsweredPart) -> Tensor:
        if answered.part.logits is None:
            raise EngineError("SGLang wrote no logits: expected them in the part of a request that asks for them")
        return answered.part.logits

    def _build_prefill(self, with_logits: bool) -> dict[str, Any]:
        return PREFILL_ONLY

    def _build_sampling(
        self, sampling: ResponseSpec, seed_key: str, room: int, end_ids: Collection[int]
    ) -> dict[str, Any]:
        return build_sampling_parameters(sampling, seed_key, room, end_ids)


def build_sampling_parameters(
    sampling: ResponseSpec, seed_key: str, room: int, end_ids: Collection[int]
) -> dict[str, Any]:
    """Return the sampling options under SGLang's names.

    Args:
        seed_key: with the seed, the source of a request's random numbers.
        room: upper limit of new tokens, even if `sampling` allows more.
    """
    parameters = {
        "max_new_tokens": min(sampling.max_new_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(end_ids),
    }
    if sampling.temperature > 0:
        parameters["sampling_seed"] = derive_seed(sampling.seed, seed_key)
    return parameters
