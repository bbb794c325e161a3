"""KV connector inside vLLM that hands over hidden states of finished requests.

It runs in vLLM's environment and needs torch and safetensors only. vLLM loads it by `kv_connector_module_path` of its
option for KV transfer, beside its own method `extract_hidden_states`, which keeps the tapped streams in a cache of blocks.
This is the only module of Draftworks that uses vLLM's internal types, those of the versions in draftworks.vllm.environment.
vLLM calls this interface experimental.

Nothing here is named by a request: hidden states go to the destination of the engine's start, under an id that has to be
one of Draftworks'. vLLM creates the class in its scheduler and in each worker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec  # pyright: ignore[reportMissingImports]

from draftworks.handover.background import start_hand_over
from draftworks.vllm.capture_rows import CacheReader, FinishedRequest, FinishedRequests

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers at a step."""

    finished: tuple[FinishedRequest, ...] = ()


class DraftworksConnector(KVConnectorBase_V1, SupportsHMA):
    """Copies the rows of Draftworks' requests out of vLLM's cache and writes them in the background; loads nothing.

    vLLM frees a request's blocks when `get_finished` has returned its id.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        of_states = [number for number, spec in enumerate(specs) if isinstance(spec, HiddenStateCacheSpec)]
        group = of_states[0] if of_states else 0  # of some targets all layers are one group
        self._block_size = specs[group].block_size
        self._hand_over = start_hand_over(self._kv_transfer_config.kv_connector_extra_config)
        self._finished = FinishedRequests(self._hand_over, group)
        self._reader: CacheReader | None = None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked by vLLM from 0.33 on: its sleep moves the cache, and parts are read from where it was at the start."""
        return False

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of hidden states; every worker has the same rows, and the first one writes them.

        Raises:
            ValueError: vLLM keeps no hidden states, or in blocks of another size than those of its tables.
        """
        from vllm.distributed.parallel_state import (  # pyright: ignore[reportMissingImports]
            get_tensor_model_parallel_rank,
        )
        from vllm.model_executor.models.extract_hidden_states import (  # pyright: ignore[reportMissingImports]
            CacheOnlyAttentionLayer,
        )

        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise ValueError(
                f"draftworks: expected one cache of hidden states, found {len(layers)}: start vLLM with "
                "--speculative-config and the method extract_hidden_states"
            )
        cache = kv_caches[next(iter(layers))]
        if cache.dim() != 4 or cache.shape[2] != self._block_size:
            raise ValueError(
                f"draftworks: expected hidden states in blocks (B, k, {self._block_size}, H), found {tuple(cache.shape)}: "
                "this vLLM keeps them in another form than the tested versions"
            )
        if get_tensor_model_parallel_rank() == 0:
            self._reader = CacheReader(self._hand_over, cache)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy what the scheduler has told, and return its ids as sent; vLLM's own form of the result."""
        if self._reader is None or not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        finished = metadata.finished if isinstance(metadata, FinishedMetadata) else ()
        return self._reader.hand_over(finished) or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def shutdown(self) -> None:
        self._hand_over.flush()

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._finished.note_cached(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> FinishedMetadata:
        return FinishedMetadata(self._finished.take())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished.add(request, [block_ids]), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished.add(request, block_ids), None

    def get_finished_count(self) -> int:
        return 1  # workers that tell that a request was sent: the one that writes
