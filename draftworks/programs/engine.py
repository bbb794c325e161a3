"""`draftworks engine`: run a target's SGLang or vLLM server until Ctrl-C, at the URL in its registry entry."""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, DraftworksError, EngineError
from draftworks.preflight.compatibility import check_requirements
from draftworks.preflight.machine import locate_python
from draftworks.programs.start import CHECKOUT, LOOPBACK, report_error, require_free_port
from draftworks.servers.process import ServerProcess
from draftworks.sglang.environment import SGLANG
from draftworks.storage.identity import FileDigests, LayerTap
from draftworks.targets.gguf_store import ensure_converted
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import collect_taps
from draftworks.vllm.environment import VLLM

if TYPE_CHECKING:
    import torch

EXAMPLE = 'capture: {backend: sglang_server, server: {url: "http://127.0.0.1:30000", spool: /dev/shm/draftworks}}'
_POLL_INTERVAL_S = 1.0


def engine(
    target: Annotated[str, typer.Argument(help="The registry's name of the model.")],
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT / "registry",
) -> None:
    """Serve a target at its entry's `capture.server.url` until Ctrl-C, so that all steps of all runs share one load."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("draftworks").setLevel(logging.INFO)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a shell starts what it runs in the background with SIGINT ignored
        signal.signal(signum, signal.default_int_handler)
    try:
        server = prepare_server(target, Registry(registry))
        typer.echo(f"target {target}: {server.SOFTWARE.name} is starting; its log is {server.log}")
        _serve(target, server)
    except DraftworksError as error:
        raise report_error(error) from None


def _serve(target: str, server: ServerProcess[Any]) -> None:
    try:
        server.start()
        typer.echo(f"target {target}: {server.SOFTWARE.name} {server.version} serves at {server.url}. Ctrl-C ends it")
        while server.is_running():
            time.sleep(_POLL_INTERVAL_S)
        raise EngineError(f"{server.SOFTWARE.name} ended by itself. The end of {server.log}:\n{server.read_log_tail()}")
    except KeyboardInterrupt:
        typer.echo(f"target {target}: {server.SOFTWARE.name} is ending")
    finally:
        server.stop()


def prepare_server(name: str, registry: Registry) -> ServerProcess[Any]:
    """Return the server that a target's entry names, not started; it captures every layer that a draft reads.

    Raises:
        ConfigError: the entry names no server on this machine, or the engine cannot do what it asks for; the port is taken.
    """
    target = registry.load_target(name)
    port, spool = _find_place(target)
    require_free_port(port)
    digests = FileDigests(registry.resolve_var_folder() / "digests.json")
    ensure_converted(target, registry, digests, typer.echo)
    files = resolve_target(target, registry, digests)
    check_requirements(target, files, registry)

    from draftworks.distributed.collectives import resolve_device  # torch

    taps = tuple(LayerTap(index) for index in collect_taps(target, files.num_layers))
    device = resolve_device(target.capture.device)
    folder = registry.resolve_var_folder() / "engines" / name
    if target.capture.software == "vllm":
        return _make_vllm(target, files, device, spool, taps, registry, folder, port)
    from draftworks.capture.engines.sglang_loading import build_server_options, select_layers
    from draftworks.sglang.server import SGLangServer

    options = build_server_options(files, target.capture, device, spool, select_layers(taps))
    sglang = registry.load_deployment().sglang
    python = locate_python(registry, SGLANG)
    return SGLangServer(python, options, folder, sglang.start_timeout_s, sglang.grace_s, port)


def _make_vllm(
    target: TargetSpec,
    files: TargetFiles,
    device: torch.device,
    spool: Path,
    taps: tuple[LayerTap, ...],
    registry: Registry,
    folder: Path,
    port: int,
) -> ServerProcess[Any]:
    from draftworks.capture.engines.vllm_loading import build_server_options, select_layers
    from draftworks.vllm.server import VLLMServer

    options = build_server_options(files, target.capture, device, spool, select_layers(taps))
    vllm = registry.load_deployment().vllm
    return VLLMServer(locate_python(registry, VLLM), options, folder, vllm.start_timeout_s, vllm.grace_s, port)


def _find_place(target: TargetSpec) -> tuple[int, Path]:
    """Return the port and spool folder of the entry's server."""
    server, where = target.capture.server, f"target {target.name}: capture.server"
    if not target.capture.backend.endswith("_server") or server.url is None or server.spool is None:
        raise ConfigError(f"{where}: expected backend sglang_server or vllm_server, url and spool: {EXAMPLE}")
    place = urlsplit(server.url)
    if place.hostname not in (LOOPBACK, "localhost") or place.port is None or place.path.strip("/"):
        raise ConfigError(
            f"{where}.url: expected http://{LOOPBACK}:PORT, found {server.url}: start a server of another machine there"
        )
    return place.port, Path(server.spool)
