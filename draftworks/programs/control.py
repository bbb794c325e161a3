"""The owner of a control-plane database, as a process: serves it to processes of other hosts until it is ended.

    DRAFTWORKS_CONTROL_TOKEN=... python -m draftworks.programs.control DATABASE --listen 10.0.0.1:7420

It keeps nothing of its own. After a kill, the same command serves the same state, and clients go on.
"""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from draftworks.config.urls import parse_endpoint
from draftworks.distributed.stop_signals import Interrupted, raise_on_stop
from draftworks.errors import ConfigError, DraftworksError
from draftworks.programs.failure import leave_error_file
from draftworks.stream.control_server import ControlServer
from draftworks.stream.control_wire import load_token
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore

TokenFile = Annotated[Path | None, typer.Option(help="File with the shared secret; else DRAFTWORKS_CONTROL_TOKEN.")]


def main(
    database: Annotated[Path, typer.Argument(help="The SQLite file, on a disk of this host.")],
    listen: Annotated[str, typer.Option(help="Address and port; port 0 takes a free one.")] = "127.0.0.1:7420",
    token_file: TokenFile = None,
) -> None:
    """Serve a control-plane database until SIGTERM or SIGINT."""
    try:
        raise_on_stop()
        _serve(database, listen, token_file)
    except Interrupted:
        return  # also one that came before the server was up
    except DraftworksError as error:
        leave_error_file(error)
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _serve(database: Path, listen: str, token_file: Path | None) -> None:
    try:
        host, _, port = parse_endpoint(listen).rpartition(":")
    except ValueError as error:
        raise ConfigError(f"--listen: {error}, found {listen!r}") from error
    token = load_token(token_file)
    with (
        closing(SQLiteMetadataStore(database)) as store,
        closing(ControlServer(store, token, host.strip("[]"), int(port))) as server,
    ):
        typer.echo(f"control server on {server.address}")
        threading.Event().wait()


if __name__ == "__main__":
    typer.run(main)
