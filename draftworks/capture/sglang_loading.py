"""From a target and its registry entry to an SGLang engine: a server of our own, or one of yours, examined first."""

from __future__ import annotations

from pathlib import Path

import torch

from draftworks.capture.engine import EnginePlace, engine_identity
from draftworks.capture.sglang_engine import SGLangServerEngine
from draftworks.capture.sglang_hosts import ExternalHost, ManagedHost, ServerHost
from draftworks.capture.sglang_probe import probe_server, require_server
from draftworks.errors import CaptureError, ConfigError
from draftworks.identity import LayerTap
from draftworks.runs import TargetFiles
from draftworks.serving.sglang_client import SGLangClient
from draftworks.serving.sglang_server import ServerOptions
from draftworks.specs import CaptureSpec

CPU_MEMORY_SHARE = 0.8
"""Of main memory, at most: how many tokens the cache holds decides how much it is, a batch and the longest sample."""


def load_sglang_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None
) -> SGLangServerEngine:
    """Start a server for the target, or reach the one at `capture.server.url`. Close the engine when it is done.

    Raises:
        ConfigError: there is no SGLang of a supported version, or a tap that SGLang cannot capture.
        EngineError: the server does not start, cannot be reached, loses hidden states, or serves something else.
    """
    if place is None:
        raise ConfigError("capture backend sglang_server needs a folder for its files: call load_engine with a place")
    layer_ids = _layer_ids(place.taps, target)
    if capture.server.url is None:
        host: ServerHost = _managed(target, capture, device, place, layer_ids)
        return _engine(target, capture, host, place)
    with SGLangClient(capture.server.url, place.sglang.request_timeout_s) as client:
        info = require_server(client, target, capture, layer_ids)
    host = ExternalHost(
        SGLangClient(capture.server.url, place.sglang.request_timeout_s),
        Path(capture.server.spool or ""),
        tuple(sorted(info.layer_ids or ())),
    )
    engine = _engine(target, capture, host, place)
    try:
        probe_server(engine, host.client, target, captures=place.taps is not None)
    except BaseException:
        engine.close()
        raise
    return engine


def _engine(target: TargetFiles, capture: CaptureSpec, host: ServerHost, place: EnginePlace) -> SGLangServerEngine:
    return SGLangServerEngine(target, engine_identity(capture), host, place.head, place.sglang.attempts)


def _managed(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace, layer_ids: tuple[int, ...]
) -> ManagedHost:
    server, on_gpu = capture.server, device.type == "cuda"
    options = ServerOptions(
        model=target.model,
        revision=target.revision,
        tokenizer=target.tokenizer,
        context=target.context,
        dtype=capture.compute_dtype,
        device=device.type,
        layer_ids=layer_ids,
        spool=place.folder.resolve() / "spool",
        tp_size=server.tp_size,
        first_gpu=place.local_rank * server.tp_size,
        mem_fraction=server.mem_fraction or (None if on_gpu else CPU_MEMORY_SHARE),
        max_total_tokens=server.max_total_tokens or (None if on_gpu else capture.batch_tokens + 2 * target.context),
        extra=tuple(server.args),
    )
    return ManagedHost(Path(place.sglang.python), options, place.folder.resolve(), place.sglang)


def _layer_ids(taps: tuple[LayerTap, ...] | None, target: TargetFiles) -> tuple[int, ...]:
    """Layers whose outputs the taps are. Some layer is captured even for `last` alone: only then SGLang keeps both."""
    if taps is None:
        return ()
    if any(tap.hf_index == 0 for tap in taps):
        raise CaptureError(
            f"target {target.name}: tap hf0, the embeddings, is none that SGLang captures. Capture with backend hf, or "
            "choose other layers"
        )
    return tuple(sorted(tap.to_layer_output() for tap in taps)) or (0,)
