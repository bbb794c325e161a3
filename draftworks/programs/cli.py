"""The command line `draftworks`. `draftworks run` starts Dagster; the other commands read the registry and results."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer._click.exceptions import ClickException, NoArgsIsHelpError, UsageError
from typer.core import TyperCommand, TyperGroup

from draftworks.errors import DraftworksError
from draftworks.storage.words import suggest

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
    said = said.replace("Input should be", "expected a number")
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


# Headings of the list of commands
BEGIN = "Begin"
MAKE = "Make drafts"
SEE = "See what there is"
SERVE = "Put into service"
DECIDE = "Decide"
KEEP = "Keep and remove"

COMMANDS = {
    "check": CommandPlace(
        "checking",
        "check",
        "Check every target's registry entry, files, drafts and a sample of its data, and print errors and warnings.",
        BEGIN,
    ),
    "doctor": CommandPlace(
        "checking",
        "doctor",
        "Examine this installation: versions, disk, GPU, SGLang, permissions, Dagster, clocks, storage, secrets.",
        BEGIN,
    ),
    "keys": CommandPlace("keys", "keys", "List every key of a registry file: type, default, meaning.", BEGIN),
    "ui": CommandPlace("start", "ui", "Start the Dagster UI and daemon; Ctrl-C ends them.", BEGIN),
    "new": CommandPlace(
        "new",
        "new",
        "Write the entry of a new target, with defaults that fit its model and data; then check it and show its plan.",
        BEGIN,
    ),
    "run": CommandPlace(
        "start",
        "run",
        "Run a job for one target, in a terminal or in CI. If it fails, the last lines say why; exit code not 0.",
        MAKE,
    ),
    "plan": CommandPlace(
        "checking",
        "plan",
        "Show what is left to do for a target's drafts: tokens, bytes, hours, money; stored, in fp8, and streamed.",
        MAKE,
    ),
    "engine": CommandPlace(
        "engine",
        "engine",
        "Serve a target at its entry's `capture.server.url` until Ctrl-C, so that all steps of all runs share one load.",
        MAKE,
    ),
    "import": CommandPlace(
        "importing",
        "import_checkpoint",
        "Import a checkpoint of other software as a draft, to measure or train it; prints the registry entry for it.",
        MAKE,
    ),
    "export-features": CommandPlace(
        "export_features",
        "export_features",
        "Write the stored training features of a target in the layout of speculators 0.9.0.",
        MAKE,
    ),
    "summary": CommandPlace(
        "summary", "summary", "Show what exists for a target: every result, and the acceptance of its drafts.", SEE
    ),
    "status": CommandPlace(
        "summary",
        "status",
        "Show every draft: promised and served acceptance, and what a person should do, the most urgent first.",
        SEE,
    ),
    "page": CommandPlace(
        "summary",
        "page",
        "Write every draft on one HTML page: promised and served, slices, costs, decisions, commands. No server needed.",
        SEE,
    ),
    "leaderboard": CommandPlace(
        "summary",
        "leaderboard",
        "Show every draft of every target: acceptance, age, the best ever, what it is stale against. In a file, as Markdown.",
        SEE,
    ),
    "compare": CommandPlace(
        "summary",
        "compare",
        "Compare two drafts: recipes, data, figures with paired intervals, slices, sizes and costs. Reads records only.",
        SEE,
    ),
    "slices": CommandPlace(
        "slice_commands",
        "slices",
        "Show which slices accept less than at promotion, by language, length, thinking and source; --save weighs them.",
        SEE,
    ),
    "observe": CommandPlace(
        "observe",
        "observe",
        "Read servers' counters and logs of requests, and show what is accepted beside first hours and the walk.",
        SEE,
    ),
    "record": CommandPlace(
        "record",
        "record",
        "Stand in front of a server, pass everything through, and write one line a request: what its draft accepted.",
        SEE,
    ),
    "promote": CommandPlace(
        "service_commands",
        "promote",
        "Put a draft into service: if it is not inferior to the best one that was, and its exports pass. Tells servers.",
        SERVE,
    ),
    "rollback": CommandPlace(
        "service_commands",
        "rollback",
        "Take back the last promotion: end a canary, or put the draft before it into service. Tells servers.",
        SERVE,
    ),
    "in-service": CommandPlace(
        "service_commands",
        "in_service",
        "Show the draft in service, its state, figures and canary; with --folder, where a server finds it.",
        SERVE,
    ),
    "bundle": CommandPlace(
        "bundle",
        "bundle",
        "Make one object of a draft to deploy: files, flags, promised tokens by slice, licences, lineage; or verify one.",
        SERVE,
    ),
    "exchange": CommandPlace(
        "exchange",
        "exchange",
        "Have a running vLLM load the draft in service, without a restart; prints what a service hook confirms with.",
        SERVE,
    ),
    "decide": CommandPlace(
        "service_commands",
        "decide",
        "Decide from the newest report whether the draft in service is kept, tuned or trained anew; starts nothing.",
        DECIDE,
    ),
    "decisions": CommandPlace(
        "service_commands",
        "decisions",
        "List every decision with what it waits for, the most urgent first, and what is used of the budget.",
        DECIDE,
    ),
    "accept": CommandPlace(
        "service_commands",
        "accept",
        "Answer the newest decision: what it calls for, or --choice, starts as soon as the budget allows.",
        DECIDE,
    ),
    "hold": CommandPlace(
        "service_commands",
        "hold",
        "Start nothing for a target, whatever is decided or accepted, until it is released; what works goes on.",
        DECIDE,
    ),
    "release": CommandPlace("service_commands", "release", "End a hold.", DECIDE),
    "notify": CommandPlace(
        "observe",
        "notify",
        "Show the channels of `notifications` and what they are still to be told; with --test, try them.",
        DECIDE,
    ),
    "usage": CommandPlace(
        "retention",
        "usage",
        "Show how many bytes each kind of result takes, for each target, and what is pinned.",
        KEEP,
    ),
    "prune": CommandPlace(
        "retention",
        "prune",
        "Remove what no current, best, pinned or promoted result was made from; shows it only, unless --yes is given.",
        KEEP,
    ),
    "pin": CommandPlace(
        "retention", "pin", "Keep a result, and all that it was made from, until it is unpinned.", KEEP
    ),
    "unpin": CommandPlace("retention", "unpin", "Take a pin away.", KEEP),
}
"""By name, in the order of the help. Their modules cost up to a second of imports, which `--help` and other commands
do not pay."""


class DraftworksGroup(PlainGroup):
    """The commands of `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, place in COMMANDS.items():
            self.add_command(LazyCommand(name, place))


app = typer.Typer(cls=DraftworksGroup, add_completion=False, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        from draftworks.storage.identity import read_version

        typer.echo(read_version("draftworks"))
        raise typer.Exit


@app.callback()
def draftworks(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Draft models for a fleet of LLMs."""


if __name__ == "__main__":
    app()
