"""Loading of a target with SGLang: in this process, as servers started here, or as external servers, checked first.

SGLang returns no embeddings, so the tap hf0 is available only if it is rows of the target's input matrix, unchanged. By
definition hf0 is the input of the first decoder layer. Some models scale, normalise or add to the embeddings that they
look up, each in its own way; to find out, the model's own code is run up to that layer, without weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftworks.capture.engine import EnginePlace, make_engine_identity
from draftworks.capture.engines.hf import find_decoder_layers
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.server_hosts import ExternalHost, ManagedHost, probe_server, start_all
from draftworks.capture.engines.sglang_engine import EMBEDDINGS, SGLangEngine
from draftworks.capture.engines.sglang_hosts import EmbeddedHost, make_managed_host, require_server
from draftworks.capture.engines.sglang_job import BalancedHost, JobHost
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError
from draftworks.handover.mooncake_parts import MooncakeSource
from draftworks.handover.spool import PartSource, sweep
from draftworks.sglang.client import SGLangClient
from draftworks.sglang.environment import SGLANG
from draftworks.sglang.job_servers import JobServers
from draftworks.sglang.layers import choose_capture_convention, read_architecture
from draftworks.sglang.server import ServerOptions
from draftworks.storage.identity import LayerTap

CPU_MEMORY_SHARE = 0.8
"""Largest share of main memory; the actual size follows from the cache's tokens: a batch and the longest sample."""
_ABANDONED_AFTER_TIMEOUTS = 10
"""Age, in request timeouts, after which a file in an external server's spool is removed.

Such a file is older than any request that is still waiting: the capture that requested it was killed.
"""


def load_sglang_engine(
    target: TargetFiles, capture: CaptureSpec, device: torch.device, place: EnginePlace | None
) -> SGLangEngine:
    """Start SGLang for the target, or connect to the servers of `capture.server`. The caller closes the engine.

    Raises:
        ConfigError: `place` is missing, or there is no SGLang of a supported version.
        CaptureError: the embeddings are tapped, and the target changes them after the look-up.
        EngineError: SGLang does not start, cannot be reached, loses hidden states, or serves something else.
    """
    if place is None:
        raise ConfigError(
            f"capture backend {capture.backend} needs a folder for its files: pass `place` to load_engine"
        )
    if capture.backend == "sglang":
        SGLANG.require_here()
    if EMBEDDINGS in (place.taps or ()):
        require_plain_embeddings(target)
    layer_ids = select_layers(place.taps)
    mooncake = None if capture.server.mooncake is None else Path(capture.server.mooncake)
    source = None if mooncake is None else _open_mooncake(mooncake)  # before anything is started
    if not capture.server.external:
        spool = place.folder.resolve() / "spool"
        options = build_server_options(target, capture, device, spool, layer_ids, place.local_rank, mooncake)
        host = _start_host(options, capture, place, source)
        _read_from(source, host)
        return _make_engine(target, capture, host, place)
    return _make_engine(target, capture, _connect_external(target, capture, place, layer_ids, source), place)


def _connect_external(
    target: TargetFiles,
    capture: CaptureSpec,
    place: EnginePlace,
    layer_ids: tuple[int, ...],
    source: PartSource | None,
) -> EngineHost:
    """Connect to the external servers: check the settings of all of them, then probe each with a request."""
    hosts: list[ExternalHost[SGLangClient]] = []
    try:
        for url in capture.server.external:
            client = SGLangClient(url, place.sglang.request_timeout_s)
            hosts.append(ExternalHost(client, Path(capture.server.spool or ""), layer_ids))
            info = require_server(client, target, capture, layer_ids, place.longest)
            hosts[-1].layer_ids, hosts[-1].version = tuple(sorted(info.layer_ids or ())), info.version
        if capture.server.spool is not None:
            sweep(hosts[0].spool, _ABANDONED_AFTER_TIMEOUTS * place.sglang.request_timeout_s)
        _read_from(source, *hosts)
        for host in hosts:
            probe_server(
                _make_engine(target, capture, host, place), host.client.tokenize, target, place.taps is not None
            )
        if len(hosts) == 1:
            return hosts[0]
        return BalancedHost(hosts, hosts[0].spool, capture.server.max_outstanding, can_restart=False)
    except BaseException:
        for host in hosts:
            host.close()
        raise


def _make_engine(target: TargetFiles, capture: CaptureSpec, host: EngineHost, place: EnginePlace) -> SGLangEngine:
    dtype = getattr(torch, capture.compute_dtype)
    return SGLangEngine(
        target, make_engine_identity(capture), host, place.head, place.embedding, place.sglang.attempts, dtype
    )


def _start_host(
    options: ServerOptions, capture: CaptureSpec, place: EnginePlace, source: PartSource | None
) -> EngineHost:
    if capture.backend == "sglang":
        return EmbeddedHost(options, place.sglang)
    if place.servers is not None:
        return start_job_servers(options, capture, place, place.servers, source)
    if capture.server.replicas > 1:
        return start_replicas(options, capture.server.replicas, capture.server.max_outstanding, place)
    return make_managed_host(Path(place.sglang.python), options, place.folder.resolve(), place.sglang).start()


def build_server_options(
    target: TargetFiles,
    capture: CaptureSpec,
    device: torch.device,
    spool: Path,
    layer_ids: tuple[int, ...],
    local_rank: int = 0,
    mooncake: Path | None = None,
) -> ServerOptions:
    """Return the options of a server that Draftworks starts for a target, according to the registry.

    Args:
        layer_ids: see `select_layers`.
        local_rank: local rank of the process that starts the server; it decides the server's GPUs.
        mooncake: address file of the Mooncake store that hidden states go through instead of the spool.
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
        convention=choose_capture_convention(read_architecture(target)),
        mooncake=mooncake,
    )


def _open_mooncake(address_file: Path) -> MooncakeSource:
    source = MooncakeSource(address_file)
    source.sweep()
    return source


def _read_from(source: PartSource | None, *hosts: EngineHost) -> None:
    """Have hosts and their members read hidden states from a source; None leaves them their spools."""
    for host in hosts:
        for each in (host, *host.list_members()):
            each.source = source


def select_layers(taps: tuple[LayerTap, ...] | None) -> tuple[int, ...]:
    """Return the layers whose outputs are the taps, ascending; empty for None.

    For `last` alone layer 0 is captured, because SGLang keeps hidden states only if at least one layer is captured.
    """
    if taps is None:
        return ()
    return tuple(sorted(tap.to_layer_output() for tap in taps if tap != EMBEDDINGS)) or (0,)


def start_replicas(options: ServerOptions, count: int, max_outstanding: int, place: EnginePlace) -> BalancedHost:
    """Start `count` servers as one host; see `start_servers`."""
    hosts = start_servers(options, count, place)
    return BalancedHost(hosts, options.spool, max_outstanding, can_restart=True)


def start_job_servers(
    options: ServerOptions,
    capture: CaptureSpec,
    place: EnginePlace,
    servers: JobServers,
    source: PartSource | None = None,
) -> JobHost:
    """Start this rank's servers of a job on its node's address, with the job's key; see `start_servers`.

    Answers are generated by the servers of all ranks alike, hidden states by this rank's own as long as they serve.
    """
    options = replace(options, host=servers.host, key_file=servers.key_file)
    hosts = start_servers(options, capture.server.replicas, place)
    key = servers.read_key()
    return JobHost(
        servers,
        hosts,
        hosts[0].spool,
        capture.server.max_outstanding,
        lambda url: SGLangClient(url, place.sglang.request_timeout_s, key),
        source,
        spread=place.taps is None,
    )


def start_servers(options: ServerOptions, count: int, place: EnginePlace) -> list[ManagedHost]:
    """Start `count` servers at the same time; if one does not start, or on an interrupt, all are closed.

    Args:
        options: options of a single server, which alone would use `gpus` GPUs from `place.local_rank * gpus` on.

    Raises:
        ConfigError, EngineError: see `ManagedHost.start`.
    """
    folder = place.folder.resolve()

    def make_host(number: int) -> ManagedHost:
        first_gpu = (place.local_rank * count + number) * options.gpus
        own = replace(options, spool=folder / f"server{number}" / "spool", first_gpu=first_gpu)
        return make_managed_host(Path(place.sglang.python), own, folder / f"server{number}", place.sglang)

    hosts = [make_host(number) for number in range(count)]
    start_all(hosts)
    return hosts


def require_plain_embeddings(target: TargetFiles) -> None:
    """Raise CaptureError unless `hidden_states[0]` of transformers are unchanged rows of the target's input matrix."""
    problem = f"target {target.name}: tap hf0, the embeddings, cannot be captured with this backend"
    advice = "Capture with backend hf, or choose other layers"
    try:
        config = AutoConfig.from_pretrained(target.model, revision=target.revision or "main", trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
        plain = has_plain_embeddings(model)
    except Exception as error:  # each configuration class may raise errors of its own
        raise CaptureError(
            f"{problem}: running the model's code up to its first layer failed: {type(error).__name__}: {error}. "
            f"{advice}"
        ) from error
    if not plain:
        raise CaptureError(
            f"{problem}: {type(model).__name__} changes them after the look-up (by a scale or a norm). {advice}"
        )


def has_plain_embeddings(model: PreTrainedModel) -> bool:
    """Return whether the first decoder layer's input is the embedding's output; the model may be on device meta."""
    embedding = model.get_input_embeddings()
    looked_up: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        looked_up.append(output)

    hooks = [
        embedding.register_forward_hook(note),
        find_decoder_layers(model)[0].register_forward_pre_hook(_stop_at_first_layer, with_kwargs=True),
    ]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=True)
    except _ArrivedError as arrived:
        return type(embedding) is nn.Embedding and len(looked_up) == 1 and arrived.states is looked_up[0]
    finally:
        for hook in hooks:
            hook.remove()
    return False


class _ArrivedError(Exception):
    """Raised by a hook to end a forward pass at the first decoder layer; `states` is the layer's input (B, S, H)."""

    def __init__(self, states: Tensor) -> None:
        super().__init__("the first layer is reached")
        self.states = states


def _stop_at_first_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _ArrivedError(args[0] if args else kwargs["hidden_states"])
