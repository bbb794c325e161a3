"""Several SGLang servers of our own, started side by side: each has GPUs, a spool and a log of its own."""

from __future__ import annotations

from concurrent.futures import Future, as_completed
from dataclasses import replace
from pathlib import Path

from draftworks.capture.background import in_background
from draftworks.capture.engine import EnginePlace
from draftworks.capture.engines.sglang_hosts import ManagedHost
from draftworks.capture.engines.sglang_spread import SpreadHost, close_all
from draftworks.sglang.server import ServerOptions


def start_replicas(options: ServerOptions, count: int, max_outstanding: int, place: EnginePlace) -> SpreadHost:
    """Start `count` servers together; if one does not start, or we are interrupted, none is left.

    Args:
        options: of a single server. Its GPUs would be `gpus` from `place.local_rank * gpus` on.

    Raises:
        ConfigError, EngineError: as `ManagedHost.start`.
    """
    folder = place.folder.resolve()

    def made(number: int) -> ManagedHost:
        first_gpu = (place.local_rank * count + number) * options.gpus
        own = replace(options, spool=folder / f"server{number}" / "spool", first_gpu=first_gpu)
        return ManagedHost(Path(place.sglang.python), own, folder / f"server{number}", place.sglang)

    hosts = [made(number) for number in range(count)]
    starting: list[Future[ManagedHost]] = []
    try:
        starting.extend(in_background(host.start) for host in hosts)
        for each in as_completed(starting):
            each.result()
    except BaseException:
        close_all(hosts, starting)
        raise
    return SpreadHost(hosts, options.spool, max_outstanding, mends=True)
