"""What a streamed training needs beside its producers: owners of its control plane and of its memory, as processes."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

import dagster as dg

from draftworks.config.run_files import MemoryRun, ProduceRun, StoreSpec, StreamPlace
from draftworks.config.streaming import StreamingSpec
from draftworks.errors import ConfigError
from draftworks.storage.atomic import publish_file
from draftworks.stream.control_wire import TOKEN_ENV, load_token
from resources.companions import Companion
from resources.torch_job import TorchJob
from resources.workspace import Workspace
from spec_assets.common import locate_step_folder, make_companion

RESTARTS = 10
"""How often a service or a producer that was killed is started again."""
MOONCAKE = "mooncake"
_DATABASE, _TOKEN_FILE, _ADDRESS_FILE = "control.sqlite", "control.token", "control.address"
_ENDING_S = 10.0
"""Seconds in which the control server of a run that was killed has ended."""


def locate_database(folder: Path, settings: StreamingSpec, workspace: Workspace) -> Path:
    """Return the database of the stream whose files are in `folder`; alone in a folder, if it is elsewhere."""
    if settings.control_folder is None:
        return folder / _DATABASE
    return workspace.registry.resolve_path(settings.control_folder) / f"{folder.parent.name}-{folder.name}" / _DATABASE


def make_stream_place(folder: Path, settings: StreamingSpec, database: Path) -> StreamPlace:
    """Return the place of a training's stream, whose other files are in `folder`.

    Raises:
        ConfigError: the control server is to listen on an address that this machine does not have.
    """
    store = StoreSpec(
        kind=settings.store.kind,
        root=folder / ("memory" if settings.store.kind == MOONCAKE else "features"),
        timeout_s=settings.store.timeout_s,
        put_timeout_s=settings.timeout_s,
    )
    if settings.control is None:
        return StreamPlace(database=database, store=store, settings=settings)
    token_file = None if TOKEN_ENV in os.environ else obtain_token_file(folder / _TOKEN_FILE)
    control = choose_endpoint(settings.control.listen, folder / _ADDRESS_FILE)
    return StreamPlace(control=control, token_file=token_file, store=store, settings=settings)


def make_stream_services(
    context: dg.AssetExecutionContext, workspace: Workspace, database: Path, run: ProduceRun
) -> list[Companion]:
    """Return the processes that serve a stream, with the producers of `run`, until its training is over."""
    place, services = run.stream, []
    if place.control is not None:
        secret = () if place.token_file is None else ("--token-file", str(place.token_file))
        job = TorchJob("draftworks.programs.control", (str(database), "--listen", place.control, *secret))
        own = locate_step_folder(context, workspace) / "control"
        services.append(Companion(job, own, serves=True, restarts=RESTARTS))
    if place.store.kind == MOONCAKE:
        memory = MemoryRun(out=run.out, features=run.features, streams=run.streams, steps=run.steps, stream=place)
        services.append(make_companion(context, workspace, "memory", memory, 1, "cpu", serves=True, restarts=RESTARTS))
    return services


def choose_endpoint(listen: str, kept: Path) -> str:
    """Return the address with a port that is free now, if it has port 0: the one in the file `kept`, or else a new one.

    The port is kept, so that a server that is started again is found by jobs of the stream that have outlived the run that
    started them, and so that their run files are the same. A server that is about to end is waited for.

    Raises:
        ConfigError: this machine does not have the address.
    """
    host, _, port = listen.rpartition(":")
    if int(port):
        return listen
    try:
        before = kept.read_text(encoding="utf-8").strip() if kept.exists() else ""
        if before.rpartition(":")[0] == host and _wait_until_free(before):
            return before
        chosen = f"{host}:{_find_port(host, 0)}"
    except OSError as error:
        raise ConfigError(
            f"streaming.control.listen: expected an address of this machine, on which the launcher runs, found {listen!r}: "
            f"{error}"
        ) from error
    with publish_file(kept) as staging:
        staging.write_text(f"{chosen}\n", encoding="utf-8")
    return chosen


def obtain_token_file(path: Path) -> Path:
    """Return the file of a stream's secret, which only this user can read; write a new one unless it is there.

    It stays the same for all starts of a stream, as its jobs may outlive the run that started them.
    """
    if _is_private(path):
        with suppress(ConfigError):
            load_token(path)
            return path
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))
    return path


def _is_private(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_uid == os.getuid()


def _wait_until_free(endpoint: str) -> bool:
    """Whether a port can be listened on, at the latest after `_ENDING_S` seconds."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + _ENDING_S
    while True:
        try:
            return port.isdecimal() and _find_port(host, int(port)) == int(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                return False
        time.sleep(0.1)


def _find_port(host: str, port: int) -> int:
    """Return the port if it is free, or a free one for port 0. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), port), family=family) as probe:
        return int(probe.getsockname()[1])
