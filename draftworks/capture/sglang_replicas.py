"""Several SGLang servers of our own, started side by side: each has GPUs, a spool and a log of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from draftworks.capture.engine import EnginePlace
from draftworks.capture.sglang_hosts import ManagedHost
from draftworks.capture.sglang_spread import SpreadHost
from draftworks.serving.sglang_server import ServerOptions


def start_replicas(options: ServerOptions, count: int, max_outstanding: int, place: EnginePlace) -> SpreadHost:
    """Start `count` servers together; if one does not start, none is left.

    Args:
        options: of a single server. Its GPUs would be `gpus` from `place.local_rank * gpus` on.

    Raises:
        ConfigError, EngineError: as `ManagedHost`.
    """
    folder = place.folder.resolve()

    def start(number: int) -> ManagedHost:
        first_gpu = (place.local_rank * count + number) * options.gpus
        own = replace(options, spool=folder / f"server{number}" / "spool", first_gpu=first_gpu)
        return ManagedHost(Path(place.sglang.python), own, folder / f"server{number}", place.sglang)

    with ThreadPoolExecutor(count, thread_name_prefix="start") as pool:
        starting = [pool.submit(start, number) for number in range(count)]
    failures = [error for each in starting if (error := each.exception()) is not None]
    hosts = [each.result() for each in starting if each.exception() is None]
    if failures:
        for host in hosts:
            host.close()
        raise failures[0]
    return SpreadHost(hosts, options.spool, max_outstanding, mends=True)
