"""`draftworks leaderboard`: every draft of every target, in a terminal or as Markdown."""

from __future__ import annotations

import time
from collections.abc import Sequence

import typer

from draftworks.errors import DraftworksError
from draftworks.evaluation.report import text_tables
from draftworks.evaluation.report.text_tables import TextTable, print_table
from draftworks.fleet.leaderboard import CAPTION, Fleet, Standing, cells, markdown
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.targets.registry import Registry


def leaderboard(registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """Show every draft of every target: acceptance, age, the best ever, what it is stale against. In a file, as Markdown."""
    try:
        standings = Fleet.of(Registry(registry)).standings()
    except DraftworksError as error:
        raise report_error(error) from None
    if text_tables.find_terminal_width() is None:
        typer.echo(markdown(standings), nl=False)
        return
    print_table(build_leaderboard(standings, time.time()))


def build_leaderboard(standings: Sequence[Standing], now: float) -> TextTable:
    """Build the table with a row per draft; `now` is in seconds since the epoch."""
    rows = (cells(standing, now) for standing in standings)
    digests = frozenset(("draft",))
    return TextTable.of("leaderboard", rows, caption=CAPTION, digests=digests, heads=2)
