"""`draftworks leaderboard`: every draft of every target, in a terminal or as Markdown."""

from __future__ import annotations

import time

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftworks.errors import DraftworksError
from draftworks.fleet.leaderboard import Fleet
from draftworks.fleet.leaderboard_views import CAPTION, cells, markdown
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.targets.registry import Registry


def leaderboard(registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Show every draft of every target: acceptance, age, the best ever, what it is stale against. In a file, as Markdown."""
    try:
        standings = Fleet.of(Registry(registry)).standings()
    except DraftworksError as error:
        raise report_error(error) from None
    if not Console().is_terminal:
        typer.echo(markdown(standings), nl=False)
        return
    rows = [cells(standing, time.time()) for standing in standings]
    table = Table(title="leaderboard", title_justify="left", caption=CAPTION, caption_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    Console().print(table)
