"""The command line `draftworks`. `draftworks run` starts Dagster; the other commands read the registry and results."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from draftworks.programs.lazy_commands import CommandPlace, LazyCommand
from draftworks.programs.plain_commands import PlainGroup

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
        "doctor",
        "doctor",
        "Examine this installation: versions, disk, GPU, SGLang, permissions, Dagster, clocks, storage, secrets.",
        BEGIN,
    ),
    "keys": CommandPlace("key_table", "keys", "List every key of a registry file: type, default, meaning.", BEGIN),
    "ui": CommandPlace("start", "ui", "Start the Dagster UI and daemon; Ctrl-C ends them.", BEGIN),
    "run": CommandPlace(
        "start",
        "run",
        "Run a job for one target, in a terminal or in CI. If it fails, the last lines say why; exit code not 0.",
        MAKE,
    ),
    "plan": CommandPlace(
        "planning",
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
    "leaderboard": CommandPlace(
        "standings",
        "leaderboard",
        "Show every draft of every target: acceptance, age, the best ever, what it is stale against. In a file, as Markdown.",
        SEE,
    ),
    "compare": CommandPlace(
        "comparing",
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
        "Read the counters of a target's servers, and show what they accept beside their first hours and the walk.",
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
    "decide": CommandPlace(
        "decision_commands",
        "decide",
        "Decide from the newest report whether the draft in service is kept, tuned or trained anew; starts nothing.",
        DECIDE,
    ),
    "decisions": CommandPlace(
        "acting_commands",
        "decisions",
        "List every decision with what it waits for, the most urgent first, and what is used of the budget.",
        DECIDE,
    ),
    "accept": CommandPlace(
        "acting_commands",
        "accept",
        "Answer the newest decision: what it calls for, or --choice, starts as soon as the budget allows.",
        DECIDE,
    ),
    "hold": CommandPlace(
        "acting_commands",
        "hold",
        "Start nothing for a target, whatever is decided or accepted, until it is released; what works goes on.",
        DECIDE,
    ),
    "release": CommandPlace("acting_commands", "release", "End a hold.", DECIDE),
    "notify": CommandPlace(
        "notify",
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
        from draftworks.storage.installed import read_version

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
