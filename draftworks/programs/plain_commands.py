"""Commands of typer as people expect them: `-h`, flags without a type, a target by place or by option, errors in a line."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer._click.exceptions import ClickException, NoArgsIsHelpError, UsageError
from typer.core import TyperCommand, TyperGroup

from draftworks.errors import DraftworksError
from draftworks.storage.suggestions import suggest

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
BY_OPTION = {"target": ("--target", "-t"), "strategy": ("--strategy", "-s")}
"""Arguments that may be given as options too, by their name."""


class PlainCommand(TyperCommand):
    """A command whose flags show no type, and whose target and strategy may stand anywhere or be given by option."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        attributes["context_settings"] = {**(attributes.get("context_settings") or {}), **HELP_NAMES}
        super().__init__(*args, **attributes)

    def get_params(self, ctx: Any) -> list[Any]:
        return hide_types_of_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._place_names(list(args)))

    def _place_names(self, words: list[str]) -> list[str]:
        """Return the words of a command line with target and strategy at their places: in front, and after the rest."""
        arguments = [each.name for each in self.params if each.param_type_name == "argument"]
        options = {name for each in self.params if each.param_type_name == "option" for name in each.opts}
        taken: dict[str, list[str]] = {}
        for name, ways in BY_OPTION.items():
            wanted = next((each for each in (name, f"{name}s") if each in arguments), None)
            if wanted is not None and not options & set(ways):
                taken[name], words = _take_option(words, ways)
        words = [*taken.get("target", []), *words]
        if taken.get("strategy"):
            words.append(taken["strategy"][-1])
        elif {"target", "strategy"} <= set(arguments) and words and words[0].count("/") == 1:
            words[:1] = words[0].split("/")  # as `compare` takes them
        return words


class PlainGroup(TyperGroup):
    """A group of commands that tells what is wrong in one line, with what may be meant."""

    def __init__(self, **attributes: Any) -> None:
        attributes["context_settings"] = {**(attributes.get("context_settings") or {}), **HELP_NAMES}
        super().__init__(**{**attributes, "suggest_commands": False})

    def get_params(self, ctx: Any) -> list[Any]:
        return hide_types_of_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            hint = suggest(args[0], self.commands) or f"all are listed by {ctx.command_path} --help"
            raise UsageError(f"no command {args[0][:40]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *others: Any, standalone_mode: bool = True, **more: Any) -> Any:
        """Run a command. Whatever a person can put right is said in one line; exit code 2 for the command line, else 1."""
        if not standalone_mode:
            return super().main(args, *others, standalone_mode=False, **more)
        try:
            code = super().main(args, *others, standalone_mode=False, **more)
        except NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except ClickException as error:
            _end(describe_misuse(error), error.exit_code)
        except typer.Abort:
            _end("aborted", 1)
        except DraftworksError as error:
            _end(str(error), 1)
        sys.exit(code if isinstance(code, int) else 0)


def describe_misuse(error: ClickException) -> str:
    """Return what is wrong with a command line, and how it is meant to be."""
    said = re.sub(r"Input should be a valid (integer|number).*", _say_kind, error.format_message()).rstrip(".")
    context = error.ctx if isinstance(error, UsageError) else None
    command = getattr(context, "command", None)
    options = [name for each in getattr(command, "params", ()) for name in each.opts if name.startswith("--")]
    wrong = getattr(error, "option_name", None)
    if context is None or wrong is None:
        usage = "" if context is None or not isinstance(command, PlainCommand) else command.get_usage(context)
        words = " ".join(usage.removeprefix("Usage: ").replace("[OPTIONS] ", "").split())
        return f"{said[:1].lower()}{said[1:]}" + (f"; usage: {words}, and -h" if words else "")
    return f"no option {wrong}; {suggest(wrong, options) or f'all are listed by {context.command_path} --help'}"


def _say_kind(found: re.Match[str]) -> str:
    return "expected a whole number" if found[1] == "integer" else "expected a number"


def hide_types_of_flags(params: list[Any]) -> list[Any]:
    """Return parameters of a command whose flags show no type in its help, as they take no value."""
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return params


def _take_option(words: list[str], ways: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the values of an option, and the other words."""
    values, left = [], []
    found = iter(words)
    for word in found:
        name, equals, value = word.partition("=")
        if name in ways:
            given = value if equals else next(found, None)
            values += [] if given is None else [given]
        else:
            left.append(word)
    return values, left


def _end(problem: str, code: int) -> NoReturn:
    typer.echo(f"error: {problem}", err=True)
    sys.exit(code)
