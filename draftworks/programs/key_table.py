"""`draftworks keys`: the keys of a registry file as a table."""

from __future__ import annotations

from typing import Annotated

import typer

from draftworks.evaluation.report.text_tables import TextTable, print_table
from draftworks.programs.keys import FILES, list_keys
from draftworks.programs.start import report_error
from draftworks.storage.suggestions import suggest_or_list


def keys(file: Annotated[str, typer.Argument(help="target, dataset, eval or deployment")] = "target") -> None:
    """List every key of a registry file: type, default, meaning."""
    if file not in FILES:
        raise report_error(f"{file[:40]!r} is no registry file; {suggest_or_list(file, FILES)}")
    columns = ("key", "type", "default", "meaning")
    print_table(TextTable(f"registry: {file}", columns, tuple(map(tuple, list_keys(file)))))
