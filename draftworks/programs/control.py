"""The owner of a control-plane database, as a process: serves it to processes of other hosts until it is ended.

    DRAFTWORKS_CONTROL_TOKEN=... python -m draftworks.programs.control DATABASE --listen 10.0.0.1:7420

It keeps nothing of its own. After a kill, the same command serves the same state, and clients go on.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from draftworks.dataflow.control_server import ControlServer
from draftworks.dataflow.control_wire import load_token
from draftworks.dataflow.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.distributed.stop_signals import Interrupted, raise_on_stop
from draftworks.errors import ConfigError, DraftworksError

TokenFile = Annotated[Path | None, typer.Option(help="File with the shared secret; else DRAFTWORKS_CONTROL_TOKEN.")]


def main(
    database: Annotated[Path, typer.Argument(help="The SQLite file, on a disk of this host.")],
    listen: Annotated[str, typer.Option(help="Address and port; port 0 takes a free one.")] = "127.0.0.1:7420",
    token_file: TokenFile = None,
) -> None:
    """Serve a control-plane database until SIGTERM or SIGINT."""
    raise_on_stop()
    try:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--listen: expected an address as host:port, found {listen!r}")
        store = SQLiteMetadataStore(database)
        server = ControlServer(store, load_token(token_file), host.strip("[]"), int(port))
    except DraftworksError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"control server on {server.address}")
    try:
        threading.Event().wait()
    except Interrupted:
        server.close()
        store.close()


if __name__ == "__main__":
    typer.run(main)
