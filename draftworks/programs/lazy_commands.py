"""Commands of typer that stand in the help of a program without being imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from draftworks.programs.plain_commands import PlainCommand


@dataclass(frozen=True)
class CommandPlace:
    """Where the function of a command is.

    Attributes:
        module: of this package.
        help: first paragraph of the function's docstring, for the list of commands.
        panel: heading of that list under which it stands.
    """

    module: str
    function: str
    help: str
    panel: str = "Commands"


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is called, or asked for its own help."""

    def __init__(self, name: str, place: CommandPlace) -> None:
        super().__init__(name, help=place.help, rich_help_panel=place.panel)
        self.place = place

    def load(self) -> Any:
        """Import the function and return its command: one of typer's, with parameters and the whole help."""
        alone = typer.Typer(add_completion=False)
        alone.command(self.name, cls=PlainCommand)(
            getattr(import_module(f"{__package__}.{self.place.module}"), self.place.function)
        )
        return typer.main.get_command(alone)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the imported command, by which a group calls that one and not this."""
        return self.load().make_context(info_name, args, parent, **extra)
