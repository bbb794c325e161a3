"""Loading of a target with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from draftworks.capture.engine import EnginePlace, make_engine_identity
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.vllm_engine import EmbeddedVLLMHost, VLLMEngine
from draftworks.capture.probe.streamed_forward import load_final_norm
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.handover.mooncake_parts import MooncakeSource
from draftworks.storage.identity import LayerTap
from draftworks.targets.resolve import read_text_config
from draftworks.vllm.capture import CAPTURING, list_ids, make_speculative_config, make_transfer_config
from draftworks.vllm.environment import VLLM
from draftworks.vllm.server import VLLMServerOptions

_SPARE_CONTEXT = 8
"""Positions added to the context: a sample as long as the target's context has to fit, and one token more."""
_LEAST_CACHE_GB = 1
_SPARE_CACHE = 1.25
_CPU_ENVIRONMENT_GB = 1 << 30


def load_vllm_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None
) -> VLLMEngine:
    """Start vLLM for the target in this process. The caller closes the engine.

    Raises:
        ConfigError: `place` is missing, or there is no vLLM in this Python.
        EngineError: vLLM does not start.
    """
    if place is None:
        raise ConfigError(
            f"capture backend {capture.backend} needs a folder for its files: pass `place` to load_engine"
        )
    mooncake = None if capture.server.mooncake is None else Path(capture.server.mooncake)
    source = None if mooncake is None else MooncakeSource(mooncake)  # before anything is started
    if source is not None:
        source.sweep()
    VLLM.require_here()
    layer_ids = select_layers(place.taps)
    spool = place.folder.resolve() / "spool"
    options = build_server_options(target, capture, device, spool, layer_ids, mooncake)
    alone = capture.server.gpus == 1 and not (dist.is_initialized() and dist.get_world_size() > 1)
    host = EmbeddedVLLMHost(options, place.vllm, spool, layer_ids or (), alone)
    host.source = source
    return make_engine(target, capture, host, place)


def make_engine(target: TargetFiles, capture: CaptureSpec, host: EngineHost, place: EnginePlace) -> VLLMEngine:
    """Return the engine of a target on a host that serves it."""
    dtype = getattr(torch, capture.compute_dtype)

    def load_norm() -> Callable[[Tensor], Tensor]:
        return load_final_norm(target, dtype)

    return VLLMEngine(target, make_engine_identity(capture), host, place.head, load_norm, place.vllm.attempts, dtype)


def select_layers(taps: tuple[LayerTap, ...] | None) -> tuple[int, ...] | None:
    """Return the layers whose outputs are the taps, ascending, -1 for the embeddings; None where nothing is captured."""
    return None if taps is None else tuple(sorted(tap.to_layer_output() for tap in taps))


def build_server_options(
    target: TargetFiles,
    capture: CaptureSpec,
    device: torch.device,
    spool: Path,
    layer_ids: tuple[int, ...] | None,
    mooncake: Path | None = None,
) -> VLLMServerOptions:
    """Return the options of the vLLM that runs a target, according to the registry.

    Args:
        layer_ids: see `select_layers`.
        mooncake: address file of the Mooncake store that hidden states go through instead of the spool.
    """
    server, on_gpu = capture.server, device.type == "cuda"
    ids = None if layer_ids is None else list_ids(layer_ids, target.num_layers)
    return VLLMServerOptions(
        model=target.model,
        revision=target.revision,
        tokenizer=target.tokenizer,
        name=target.name,
        context=target.context + _SPARE_CONTEXT,
        dtype=capture.compute_dtype,
        device=device.type,
        speculative=None if ids is None else make_speculative_config(ids),
        kv_transfer=None if ids is None else make_transfer_config(spool, mooncake),
        tp_size=server.tp_size,
        dp_size=server.dp_size,
        mem_fraction=server.mem_fraction,
        cache_gb=_LEAST_CACHE_GB if on_gpu else _choose_cache_gb(target, capture, len(ids or ())),
        extra=(*(() if ids is None else CAPTURING), *server.args),
    )


def _choose_cache_gb(target: TargetFiles, capture: CaptureSpec, streams: int) -> int:
    """Return the size of the cache on a CPU: for `max_total_tokens`, or a batch and two of the longest samples."""
    tokens = capture.server.max_total_tokens or capture.batch_tokens + 2 * (target.context + _SPARE_CONTEXT)
    config = read_text_config(target)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 1
    width = config.get("head_dim") or target.hidden_size // (config.get("num_attention_heads") or 1)
    values = 2 * target.num_layers * heads * width + streams * target.hidden_size
    nbytes = _SPARE_CACHE * tokens * values * getattr(torch, capture.compute_dtype).itemsize
    return max(_LEAST_CACHE_GB, -(-int(nbytes) // _CPU_ENVIRONMENT_GB))
