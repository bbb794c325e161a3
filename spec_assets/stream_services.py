"""What a streamed training needs beside its producers: owners of its control plane and of its memory, as processes."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import dagster as dg

from draftworks.config.run_files import MemoryRun, ProduceRun, StoreSpec, StreamPlace
from draftworks.config.streaming import StreamingSpec
from draftworks.dataflow.control_wire import TOKEN_ENV
from draftworks.errors import ConfigError
from resources.companions import Companion
from resources.torch_job import TorchJob
from resources.workspace import Workspace
from spec_assets.common import locate_step_folder, make_companion

RESTARTS = 10
"""How often a service or a producer that was killed is started again."""
MOONCAKE = "mooncake"
_DATABASE, _TOKEN_FILE = "control.sqlite", "control.token"


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
    token_file = None if TOKEN_ENV in os.environ else make_token_file(folder / _TOKEN_FILE)
    control = choose_endpoint(settings.control.listen)
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


def choose_endpoint(listen: str) -> str:
    """Return the address with a port that is free now, if it has port 0."""
    host, _, port = listen.rpartition(":")
    if int(port):
        return listen
    try:
        with socket.create_server(
            (host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as probe:
            return f"{host}:{probe.getsockname()[1]}"
    except OSError as error:
        raise ConfigError(
            f"streaming.control.listen: expected an address of this machine, on which the launcher runs, found {listen!r}: "
            f"{error}"
        ) from error


def make_token_file(path: Path) -> Path:
    """Write a new secret that only this user can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))
    return path
