"""The commands `draftworks decisions`, `accept`, `hold` and `release`: what waits for what, and what people say to it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.evaluation.report.text_tables import TextTable, print_table
from draftworks.programs.service_commands import (
    CHECKOUT_REGISTRY,
    RegistryOption,
    StrategyArgument,
    TargetArgument,
    WhoOption,
    WhyOption,
    require_strategy,
)
from draftworks.programs.start import report_error
from draftworks.storage.suggestions import suggest
from draftworks.targets.registry import Registry

if TYPE_CHECKING:
    from draftworks.decision.answers import AnswerFile
    from draftworks.decision.queue import Step

START_NEEDS_DAEMON = (
    "start: decision_sensor starts it while Dagster's daemon runs: draftworks ui, or dagster-daemon run; draftworks doctor "
    "says whether it does"
)


def decisions(registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """List every decision with what it waits for, the most urgent first, and what is used of the budget."""
    from dataclasses import replace

    from draftworks.decision.fleet_state import FleetReader
    from draftworks.decision.queue import Action

    try:
        reader, now = FleetReader(Registry(registry)), time.time()
        state = reader.read(busy={})
        outdated = reader.find_outdated(state.decisions)
        blocking = {key: found.reason for key, found in outdated.items() if found.blocks}
        steps = reader.plan(replace(state, outdated={**blocking, **state.outdated}), now)
    except DraftworksError as error:
        raise report_error(error) from None
    for line in state.damaged:
        typer.echo(f"warning: {line}", err=True)
    used = state.ledger.sum_hours(now)
    limit = "no budget" if state.budget is None else f"{used:.3g} of {state.budget.gpu_hours_per_week:g} GPU-hours"
    print_table(build_decisions_table(f"decisions; {limit} in 7 days", steps))
    if any(step.action is Action.START for step in steps):
        typer.echo(START_NEEDS_DAEMON)


def build_decisions_table(title: str, steps: Iterable[Step]) -> TextTable:
    """Build the table with a row for each decision."""
    rows = [
        (step.target, step.strategy, str(step.choice), str(step.action), f"{step.priority:.3g}")
        + ("" if step.hours is None else f"{step.hours:.3g}", step.reason)
        for step in steps
    ]
    columns = ("target", "strategy", "choice", "now", "traffic x loss", "GPU-hours", "why")
    return TextTable(title, columns, tuple(rows), right=frozenset(("traffic x loss", "GPU-hours")), heads=2)


def accept(
    target: TargetArgument,
    strategy: StrategyArgument,
    choice: Annotated[
        str | None, typer.Option("--choice", help="keep, tune or retrain; by default what was decided.")
    ] = None,
    why: WhyOption = None,
    who: WhoOption = None,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Answer the newest decision: what it calls for, or --choice, starts as soon as the budget allows."""
    from draftworks.decision.record import Choice

    try:
        if choice is not None and choice not in ("keep", "tune", "retrain"):
            hint = suggest(choice, ("keep", "tune", "retrain"))
            raise ConfigError(f"--choice: expected keep, tune or retrain, found {choice!r:.50}; {hint}".rstrip("; "))
        file = open_answers(registry, target)
        require_strategy(Registry(registry), target, strategy)
        earlier = file.read().given.get((target, strategy))
        given = file.accept(
            target, strategy, None if choice is None else Choice(choice), _name(who), why or "", time.time()
        )
    except DraftworksError as error:
        raise report_error(error) from None
    held = file.read().holds.get(target)
    typer.echo(f"{given.choice} of the {strategy} draft of {target} is accepted {given.describe()}")
    if earlier is not None and (earlier.subject, earlier.choice) != (given.subject, given.choice):
        about = "" if earlier.subject == given.subject else ", about an earlier decision"
        typer.echo(f"the answer before it: {earlier.choice}, {earlier.describe()}{about}")
    if given.choice is Choice.KEEP:
        typer.echo("nothing starts")
    elif Registry(registry).load_deployment().budget is None:
        typer.echo(
            "warning: deployment.yaml has no budget, so nothing starts by itself: add budget: {gpu_hours_per_week: N}, or "
            f"draftworks run {given.choice}_{strategy} --target {target}",
            err=True,
        )
    if held is not None:
        typer.echo(f"the target is on hold {held.describe()}: nothing starts before draftworks release {target}")


def hold(
    target: TargetArgument, why: WhyOption = None, who: WhoOption = None, registry: RegistryOption = CHECKOUT_REGISTRY
) -> None:
    """Start nothing for a target, whatever is decided or accepted, until it is released; what works goes on."""
    try:
        held = open_answers(registry, target).hold(target, _name(who), why or "", time.time())
    except DraftworksError as error:
        raise report_error(error) from None
    typer.echo(f"target {target} is on hold {held.describe()}")


def release(
    target: TargetArgument, why: WhyOption = None, who: WhoOption = None, registry: RegistryOption = CHECKOUT_REGISTRY
) -> None:
    """End a hold."""
    try:
        open_answers(registry, target).release(target, _name(who), why or "", time.time())
        settings = Registry(registry).load_target(target).decision
    except DraftworksError as error:
        raise report_error(error) from None
    typer.echo(f"target {target} is released")
    if settings is not None and settings.hold:
        typer.echo("its entry has decision.hold: true, which holds it still")


def open_answers(registry: Path, target: str) -> AnswerFile:
    """Return the file of answers. Raises ConfigError if there is no such target."""
    from draftworks.decision.answers import AnswerFile

    found = Registry(registry)
    found.find_target_file(target)
    return AnswerFile(found.resolve_var_folder())


def _name(who: str | None) -> str:
    from draftworks.service.promotion import name_user

    return who or name_user()
