"""From a target and its registry entry to SGLang: in this process, a server of our own, or one of yours, examined first."""

from __future__ import annotations

from pathlib import Path

import torch

from draftworks.capture.engine import EnginePlace, engine_identity
from draftworks.capture.engines.embedding_tap import require_plain_embeddings
from draftworks.capture.engines.sglang_engine import EMBEDDINGS, SGLangEngine
from draftworks.capture.engines.sglang_examination import probe_server, require_server
from draftworks.capture.engines.sglang_hosts import EmbeddedHost, ExternalHost, ManagedHost, SGLangHost
from draftworks.capture.engines.sglang_replicas import start_replicas
from draftworks.capture.engines.sglang_spread import SpreadHost
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.sglang.client import SGLangClient
from draftworks.sglang.embedded import require_sglang_here
from draftworks.sglang.layers import architecture_of, capture_convention
from draftworks.sglang.server import ServerOptions
from draftworks.sglang.spool import sweep
from draftworks.storage.identity import LayerTap

CPU_MEMORY_SHARE = 0.8
"""Of main memory, at most: how many tokens the cache holds decides how much it is, a batch and the longest sample."""
_ABANDONED_AFTER_TIMEOUTS = 10
"""A file in your spool is older than any request of ours that still waits: the capture that asked for it was killed."""


def load_sglang_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None
) -> SGLangEngine:
    """Start SGLang for the target, or reach the servers of `capture.server`. Close the engine when it is done.

    Raises:
        ConfigError: there is no SGLang of a supported version.
        CaptureError: the embeddings are tapped, and the target does more to them than to look them up.
        EngineError: SGLang does not start, cannot be reached, loses hidden states, or serves something else.
    """
    if place is None:
        raise ConfigError(
            f"capture backend {capture.backend} needs a folder for its files: call load_engine with a place"
        )
    if capture.backend == "sglang":
        require_sglang_here()
    if EMBEDDINGS in (place.taps or ()):
        require_plain_embeddings(target)
    layer_ids = layers_to_capture(place.taps)
    if not capture.server.external:
        spool = place.folder.resolve() / "spool"
        options = server_options(target, capture, device, spool, layer_ids, place.local_rank)
        return _engine(target, capture, _started(options, capture, place), place)
    return _engine(target, capture, _external(target, capture, place, layer_ids), place)


def _external(target: TargetFiles, capture: CaptureSpec, place: EnginePlace, layer_ids: tuple[int, ...]) -> SGLangHost:
    """Your servers: all of them examined first, then each asked something."""
    hosts: list[ExternalHost] = []
    try:
        for url in capture.server.external:
            client = SGLangClient(url, place.sglang.request_timeout_s)
            hosts.append(ExternalHost(client, Path(capture.server.spool or ""), layer_ids))
            info = require_server(client, target, capture, layer_ids, place.longest)
            hosts[-1].layer_ids, hosts[-1].version = tuple(sorted(info.layer_ids or ())), info.version
        sweep(hosts[0].spool, _ABANDONED_AFTER_TIMEOUTS * place.sglang.request_timeout_s)
        for host in hosts:
            probe_server(_engine(target, capture, host, place), host.client, target, captures=place.taps is not None)
        if len(hosts) == 1:
            return hosts[0]
        return SpreadHost(hosts, hosts[0].spool, capture.server.max_outstanding, mends=False)
    except BaseException:
        for host in hosts:
            host.close()
        raise


def _engine(target: TargetFiles, capture: CaptureSpec, host: SGLangHost, place: EnginePlace) -> SGLangEngine:
    dtype = getattr(torch, capture.compute_dtype)
    return SGLangEngine(
        target, engine_identity(capture), host, place.head, place.embedding, place.sglang.attempts, dtype
    )


def _started(options: ServerOptions, capture: CaptureSpec, place: EnginePlace) -> SGLangHost:
    if capture.backend == "sglang":
        return EmbeddedHost(options, place.sglang)
    if capture.server.replicas > 1:
        return start_replicas(options, capture.server.replicas, capture.server.max_outstanding, place)
    return ManagedHost(Path(place.sglang.python), options, place.folder.resolve(), place.sglang).start()


def server_options(
    target: TargetFiles,
    capture: CaptureSpec,
    device: torch.device,
    spool: Path,
    layer_ids: tuple[int, ...],
    local_rank: int = 0,
) -> ServerOptions:
    """How a server of ours serves a target, by the registry.

    Args:
        layer_ids: see `layers_to_capture`.
        local_rank: of the process that starts it, which decides its GPUs.
    """
    server, on_gpu = capture.server, device.type == "cuda"
    return ServerOptions(
        model=target.model,
        revision=target.revision,
        tokenizer=target.tokenizer,
        context=target.context,
        dtype=capture.compute_dtype,
        device=device.type,
        layer_ids=layer_ids,
        spool=spool,
        tp_size=server.tp_size,
        dp_size=server.dp_size,
        first_gpu=local_rank * server.tp_size * server.dp_size,
        mem_fraction=server.mem_fraction or (None if on_gpu else CPU_MEMORY_SHARE),
        max_total_tokens=server.max_total_tokens or (None if on_gpu else capture.batch_tokens + 2 * target.context),
        extra=tuple(server.args),
        convention=capture_convention(architecture_of(target)),
    )


def layers_to_capture(taps: tuple[LayerTap, ...] | None) -> tuple[int, ...]:
    """Layers whose outputs the taps are. Some layer is captured even for `last` alone: only then SGLang keeps both."""
    if taps is None:
        return ()
    return tuple(sorted(tap.to_layer_output() for tap in taps if tap != EMBEDDINGS)) or (0,)
