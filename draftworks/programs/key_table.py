"""`draftworks keys`: the keys of a registry file as a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from draftworks.programs.keys import FILES, list_keys
from draftworks.programs.start import report_error
from draftworks.storage.suggestions import suggest_or_list


def keys(file: Annotated[str, typer.Argument(help="target, dataset, eval or deployment")] = "target") -> None:
    """List every key of a registry file: type, default, meaning."""
    if file not in FILES:
        raise report_error(f"{file[:40]!r} is no registry file; {suggest_or_list(file, FILES)}")
    name = Column("key", no_wrap=True)  # a name that is cut off cannot be used
    table = Table(name, "type", "default", "meaning", title=f"registry: {file}", title_justify="left")
    for key in list_keys(file):
        table.add_row(*key)
    Console(width=None if Console().is_terminal else 160).print(table)
