"""Loading of a target with vLLM: in this process, as servers started here, or as external servers, checked first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftworks.capture.engine import EnginePlace, make_engine_identity
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.server_hosts import (
    Connect,
    ExternalHost,
    ManagedHost,
    is_same_model,
    probe_server,
    start_all,
)
from draftworks.capture.engines.sglang_job import BalancedHost, JobHost
from draftworks.capture.engines.vllm_engine import EmbeddedVLLMHost, VLLMEngine
from draftworks.capture.probe.streamed_forward import load_final_norm
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, EngineError
from draftworks.handover.mooncake_parts import MooncakeSource
from draftworks.handover.spool import PartSource, sweep
from draftworks.servers.process import LOOPBACK
from draftworks.storage.identity import LayerTap
from draftworks.targets.resolve import read_text_config
from draftworks.vllm.capture import CAPTURING, list_ids, make_speculative_config, make_transfer_config
from draftworks.vllm.environment import VLLM
from draftworks.vllm.generate_client import VLLMGenerateClient
from draftworks.vllm.server import VLLMServer, VLLMServerOptions, describe_command

_ABANDONED_AFTER_TIMEOUTS = 10
"""Age, in request timeouts, after which a file in an external server's spool is of a capture that was killed."""
_SPARE_CONTEXT = 8
"""Positions added to the context: a sample as long as the target's context has to fit, and one token more."""
_LEAST_CACHE_GB = 1
_SPARE_CACHE = 1.25
_CPU_ENVIRONMENT_GB = 1 << 30


def load_vllm_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None
) -> VLLMEngine:
    """Start vLLM for the target, or connect to the servers of `capture.server`. The caller closes the engine.

    Raises:
        ConfigError: `place` is missing, or there is no vLLM in this Python.
        EngineError: vLLM does not start, cannot be reached, hands over no hidden states, or serves something else.
    """
    if place is None:
        raise ConfigError(
            f"capture backend {capture.backend} needs a folder for its files: pass `place` to load_engine"
        )
    mooncake = None if capture.server.mooncake is None else Path(capture.server.mooncake)
    source = None if mooncake is None else MooncakeSource(mooncake)  # before anything is started
    if source is not None:
        source.sweep()
    if capture.server.external:
        return make_engine(target, capture, _connect_external(target, capture, device, place, source, mooncake), place)
    layer_ids = select_layers(place.taps)
    if capture.backend == "vllm_server":
        hosts = start_vllm_servers(target, capture, device, place, mooncake)
        for each in hosts:
            each.source = source
        return make_engine(target, capture, _join(hosts, target.name, capture, place, source), place)
    VLLM.require_here()
    spool = place.folder.resolve() / "spool"
    options = build_server_options(target, capture, device, spool, layer_ids, mooncake)
    alone = capture.server.gpus == 1 and not (dist.is_initialized() and dist.get_world_size() > 1)
    host = EmbeddedVLLMHost(options, place.vllm, spool, layer_ids or (), alone)
    host.source = source
    return make_engine(target, capture, host, place)


def start_vllm_servers(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace, mooncake: Path | None = None
) -> list[ManagedHost]:
    """Start this process's servers, `capture.server.replicas`, each with a folder, a spool and GPUs of its own.

    Raises:
        ConfigError, EngineError: see `ManagedHost.start`.
    """
    layer_ids, count = select_layers(place.taps), capture.server.replicas
    key_file = None if place.servers is None else place.servers.key_file
    connect = _make_connect(place, target.name)

    def make_host(number: int) -> ManagedHost:
        folder = place.folder.resolve() / f"server{number}"
        folder.mkdir(parents=True, exist_ok=True)
        options = replace(
            build_server_options(target, capture, device, folder / "spool", layer_ids, mooncake),
            first_gpu=(place.local_rank * count + number) * capture.server.gpus,
            host=LOOPBACK if place.servers is None else place.servers.host,
            key_file=key_file,
        )
        server = VLLMServer(Path(place.vllm.python), options, folder, place.vllm.start_timeout_s, place.vllm.grace_s)
        return ManagedHost(server, connect, folder / "spool", layer_ids or ())

    hosts = [make_host(number) for number in range(count)]
    start_all(hosts)
    return hosts


def _make_connect(place: EnginePlace, model: str) -> Connect:
    """Return what opens a client of a server of this job, which calls the target `model`."""
    key = None if place.servers is None else place.servers.read_key()
    return lambda url: VLLMGenerateClient(url, place.vllm.request_timeout_s, key, model)


def _join(
    hosts: list[ManagedHost], model: str, capture: CaptureSpec, place: EnginePlace, source: PartSource | None
) -> EngineHost[Any]:
    """Return the servers as one host, with those of a job's other ranks if it has any."""
    outstanding = capture.server.max_outstanding
    if place.servers is not None:
        connect, spread = _make_connect(place, model), place.taps is None
        return JobHost(place.servers, hosts, hosts[0].spool, outstanding, connect, source, spread)
    return hosts[0] if len(hosts) == 1 else BalancedHost(hosts, hosts[0].spool, outstanding, can_restart=True)


def _connect_external(
    target: TargetFiles,
    capture: CaptureSpec,
    device: torch.device,
    place: EnginePlace,
    source: PartSource | None,
    mooncake: Path | None,
) -> EngineHost[Any]:
    """Connect to the external servers: check what each says of itself, then probe it with requests.

    What a server captures it does not say: by the first parts it is seen how many streams, by the comparison with the
    target's weights which.
    """
    layer_ids, hosts = select_layers(place.taps) or (), list[ExternalHost[VLLMGenerateClient]]()
    spool = Path(capture.server.spool or "")
    try:
        for url in capture.server.external:
            client = VLLMGenerateClient(url, place.vllm.request_timeout_s)
            hosts.append(ExternalHost(client, spool, layer_ids))
            hosts[-1].source = source
            hosts[-1].version = require_vllm_server(client, target, capture, place.longest)
        if capture.server.spool is not None:
            if not spool.is_dir():
                raise EngineError(f"the folder capture.server.spool, {spool}, does not exist: create it")
            sweep(spool, _ABANDONED_AFTER_TIMEOUTS * place.vllm.request_timeout_s)
        for host in hosts:
            engine = make_engine(target, capture, host, place)
            probe_server(engine, host.client.tokenize_text, target, captures=place.taps is not None)
    except EngineError as error:
        _close(hosts)
        options = build_server_options(target, capture, device, spool, select_layers(place.taps), mooncake)
        raise EngineError(f"{error}. A server that fits: {describe_command(options)}") from error
    except BaseException:
        _close(hosts)
        raise
    if len(hosts) == 1:
        return hosts[0]
    return BalancedHost(hosts, spool, capture.server.max_outstanding, can_restart=False)


def _close(hosts: Iterable[EngineHost[Any]]) -> None:
    for host in hosts:
        host.close()


def require_vllm_server(client: VLLMGenerateClient, target: TargetFiles, capture: CaptureSpec, longest: int) -> str:
    """Return a server's version after checking that it serves the target.

    Args:
        longest: number of tokens of the longest sequence that will be requested; 0 if it is not known.

    Raises:
        EngineError: it serves another model, or in a context that is too short. The message names each difference.
    """
    version, expected = client.get_version(), capture.server.model or target.model
    where = f"vLLM at {client.url}"
    VLLM.check_version(version, where)
    served = next(iter(client.list_models()), None)
    problems = []
    if served is None or not (is_same_model(served.root, expected) or served.name == expected):
        found = "nothing" if served is None else f"the model {served.root}, called {served.name}"
        problems.append(
            f"it serves {found}, expected {expected}. If it is the same model under another name, set capture.server.model to "
            "that name; what it captures is still compared with the registry's weights"
        )
    if served is not None and served.context is not None and served.context <= longest:
        problems.append(f"its context is {served.context} tokens, expected more than {longest}: --max-model-len")
    if problems:
        raise EngineError(
            "\n".join([f"{where} cannot be used for target {target.name}:", *(f"  {each}" for each in problems)])
        )
    return version


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
