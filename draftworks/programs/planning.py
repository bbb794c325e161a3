"""`draftworks plan`: what drafts will cost in tokens, bytes, hours and money, and what the last ones took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftworks.errors import DraftworksError
from draftworks.evaluation.report.text_tables import TextTable, print_table, print_text
from draftworks.planning.plan import Plan, StepActual, add_plans, compare_plan, load_plan, make_plan
from draftworks.planning.plan_table import build_header, build_json, build_rows, describe_beside
from draftworks.planning.subject import PlanSubject
from draftworks.programs.start import CHECKOUT, report_error
from draftworks.targets.registry import Registry

CHECKOUT_REGISTRY = CHECKOUT / "registry"
CAPTION = (
    "* as the registry has it. Time of what is left to do, one step after the other: most likely value and bounds; "
    "GPU-hours are a step's hours times its GPUs, where a process on the CPU counts as one"
)


def plan(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET", help="One or several; these are added up.")],
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", help="Only this draft; may be given several times.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT_REGISTRY,
) -> None:
    """Show what is left to do for a target's drafts: tokens, bytes, hours, money; stored, in fp8, and streamed.

    Computes nothing: figures are those of earlier runs, of other targets, or documented ones. What exists is left out.
    """
    try:
        found = Registry(registry)
        subjects = [PlanSubject.of(name, found) for name in dict.fromkeys(targets)]
        plans = [make_plan(each, strategy or ()) for each in subjects]
        actual = _compare(subjects[0], plans[0]) if len(subjects) == 1 else ()
        made = plans[0] if len(plans) == 1 else add_plans(plans)
    except DraftworksError as error:
        raise report_error(error) from None
    if as_json:
        typer.echo(json.dumps(build_json(made, actual), indent=2))
        return
    print_table(build_plan_table(made, actual))
    chosen = [(each.target, line) for each in subjects for line in (*each.describe_chosen(), *each.describe_unknown())]
    for line in (*describe_beside(made), *(f"{target.name}: {line}" for target, line in chosen)):
        print_text(line)


def build_plan_table(made: Plan, actual: tuple[StepActual, ...] = ()) -> TextTable:
    """Build the table of a plan, with what its steps took where they are made."""
    title = f"plan of {', '.join(made.targets)}: {', '.join(made.strategies)}"
    header, rows = build_header(made, actual), tuple(build_rows(made, actual))
    return TextTable(title, header, rows, CAPTION, right=frozenset(header) - {"step", "rate"})


def _compare(subject: PlanSubject, made: Plan) -> tuple[StepActual, ...]:
    """Return what the steps of the saved plan took, for those that this plan has too."""
    saved = load_plan(subject.artifacts.root, subject.target.name)
    known = {each.asset for way in made.ways.values() for each in way.steps}
    compared = () if saved is None else compare_plan(saved, subject)
    return tuple(each for each in compared if each.step.asset in known and each.seconds is not None)
