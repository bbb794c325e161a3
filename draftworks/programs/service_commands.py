"""The commands of service and decisions: `promote`, `rollback`, `in-service`, `decide`, `decisions`, `accept`, `hold`, …"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.evaluation.report.text_tables import TextTable, print_table
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.service.candidate import find_delivery, read_states
from draftworks.service.register import InService, ServiceRegister, resolve_draft
from draftworks.service.rule import describe_figures
from draftworks.service.swap_record import find_swap
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.storage.names import of_strategy
from draftworks.storage.words import suggest, suggest_or_list
from draftworks.targets.registry import Registry

if TYPE_CHECKING:
    from draftworks.decision.queue import Step
    from draftworks.decision.record import AnswerFile
    from draftworks.service.promotion import Service


NOTHING_TO_DO = "nothing is changed, as this draft is in service already: "
TargetArgument = Annotated[str, typer.Argument(help="The registry's name of the model.")]
StrategyArgument = Annotated[str, typer.Argument(help="eagle3, dflash and their like.")]
WhyOption = Annotated[str | None, typer.Option("--why", help="The reason, for the record.")]
WhoOption = Annotated[str | None, typer.Option("--who", help="Who asks, for the record; by default user and host.")]
ExpectOption = Annotated[
    str | None,
    typer.Option("--expect", help="Digest of the draft that is replaced: with another one in service nothing is done."),
]


def promote(
    target: TargetArgument,
    strategy: StrategyArgument,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Digest of the draft, or its begin; by default the newest.")
    ] = None,
    why: WhyOption = None,
    who: WhoOption = None,
    expect: ExpectOption = None,
    canary: Annotated[
        float | None, typer.Option("--canary", help="Give it this share of the requests, beside the draft in service.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overrule the rule of promotion; needs --why. Nothing else is overruled.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what the rule says, and change nothing.")] = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Put a draft into service: if it is not inferior to the best one that was, and its exports pass. Tells servers."""
    from draftworks.service.promotion import Request, name_user

    try:
        service = open_service(registry, target, strategy)
        judgement = service.judge(draft)
        typer.echo(judgement.describe())
        if dry_run:
            verdict = (
                "is in service" if judgement.is_in_service else "accepted" if judgement.accepted else "not accepted"
            )
            typer.echo(f"draft {judgement.candidate.served.digest}: {verdict}; nothing is changed")
            return
        record = service.promote(judgement, Request(who or name_user(), why or "", expect, force, canary))
        unchanged = judgement.current is not None and record.number == judgement.current.number
        typer.echo(f"{NOTHING_TO_DO}{describe_record(record)}" if unchanged else describe_record(record))
        told = swap_and_tell(service, record, who)
    except DraftworksError as error:
        raise report_error(error) from None
    raise typer.Exit(0 if told else 1)


def rollback(
    target: TargetArgument,
    strategy: StrategyArgument,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", help="Digest, or its begin, of a draft that was in service; by default the one before."
        ),
    ] = None,
    why: WhyOption = None,
    who: WhoOption = None,
    expect: ExpectOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also a draft that was trained for other weights than the target has now.")
    ] = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Take back the last promotion: end a canary, or put the draft before it into service. Tells servers."""
    from draftworks.service.promotion import Request, name_user

    try:
        service = open_service(registry, target, strategy)
        record = service.rollback(Request(who or name_user(), why or "", expect, force), draft)
        typer.echo(describe_record(record))
        told = swap_and_tell(service, record, who)
    except DraftworksError as error:
        raise report_error(error) from None
    raise typer.Exit(0 if told else 1)


def in_service(
    target: TargetArgument,
    strategy: StrategyArgument,
    folder: Annotated[bool, typer.Option("--folder", help="Print the draft's folder and nothing else.")] = False,
    export_format: Annotated[
        str | None, typer.Option("--format", help="Export format, where there are several.")
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="Show every draft that was in service.")] = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Show the draft in service, its state, figures and canary; with --folder, where a server finds it."""
    try:
        found = Registry(registry)
        require_strategy(found, target, strategy)
        register = ServiceRegister(found.resolve_var_folder(), target, strategy)
        if folder:
            typer.echo(resolve_draft(register.var, target, strategy, export_format))
            return
        record = register.require()
        for each in register.read_history()[:-1] if history else ():
            typer.echo(f"{each.number}. {describe_record(each)}")
        typer.echo(describe_record(record))
        for digest, state in read_states(register).items():
            typer.echo(f"draft {digest}: {state}")
        for one in record.figures:
            typer.echo(describe_figures(one))
        delivery, swapped = find_delivery(register, record), find_swap(register, record)
        if swapped is not None:
            typer.echo(swapped.describe())
        if delivery is not None:
            from draftworks.service.hook import describe_delivery

            typer.echo(describe_delivery(delivery))
    except DraftworksError as error:
        raise report_error(error) from None


def require_strategy(registry: Registry, target: str, strategy: str) -> None:
    """Raise ConfigError for a target that there is not, or a strategy that it neither uses nor has drafts of."""
    registry.find_target_file(target)
    if (registry.resolve_var_folder() / of_strategy(strategy).draft / target).is_dir():
        return  # the entry may use another one now
    try:
        known = list(registry.load_target(target).strategies)
    except DraftworksError:
        return  # a broken entry does not hide what is in service
    if strategy not in known and not ServiceRegister(registry.resolve_var_folder(), target, strategy).read_history():
        raise ConfigError(f"target {target} does not use {strategy[:40]!r}; {suggest_or_list(strategy, known)}")


def open_service(registry: Path, target: str, strategy: str) -> Service:
    """Return the drafts of a strategy of a target, with the target's files as they are now."""
    from draftworks.service.promotion import Service
    from draftworks.targets.resolve import resolve_target

    found = Registry(registry)
    require_strategy(found, target, strategy)
    spec = found.load_target(target)
    digests = FileDigests(found.resolve_var_folder() / "digests.json")
    files = resolve_target(spec, found, digests)
    return Service(found, spec, files, strategy, ArtifactStore(found.resolve_var_folder(), digests))


def swap_and_tell(service: Service, record: InService, who: str | None) -> bool:
    """Have the target's running server load what is in service, call the hook, and return whether both succeeded."""
    if service.settings.swap is None:
        return tell(service, record)
    from draftworks.service.swap_record import Outcome
    from draftworks.swap.swapping import swap

    done = swap(service, record, _name(who), typer.echo)
    if done.result is not None:
        typer.echo(done.result.describe())
    if done.record != record:
        typer.echo(describe_record(done.record))
    swapped = done.result is None or done.result.outcome.serves
    if done.result is not None and done.result.outcome is Outcome.FAILED:
        typer.echo("the draft is in service; the same command has the server load it again", err=True)
    return tell(service, done.record) and swapped


def tell(service: Service, record: InService) -> bool:
    """Call the target's hook, print what has come of it, and return whether it succeeded."""
    from draftworks.service.hook import describe_delivery, tell_servers

    hook = service.settings.hook
    if hook is None:
        return True
    delivery = tell_servers(service.register, record, hook)
    typer.echo(describe_delivery(delivery))
    if not delivery.told and delivery.attempts:
        typer.echo("the draft is in service; the same command tells the servers again", err=True)
    return delivery.told or not delivery.attempts


def describe_record(record: InService) -> str:
    """Return one line about a record: action, draft, who, when, why."""
    said = f"{record.action.replace('_', ' ')}: draft {record.draft.digest} is in service for {record.target}, "
    said += f"{record.strategy}: {record.draft.path}, by {record.who} at {record.when}"
    said += f", before it {record.previous}" if record.previous else ""
    if record.canary is not None:
        said += f"; canary {record.canary.draft.digest} gets {record.canary.share:.0%} of the requests"
    said += "; the rule was overruled" if record.forced else ""
    said += f"; bundle {record.draft.bundle.digest}: {record.draft.bundle.path}" if record.draft.bundle else ""
    return said + (f": {record.why}" if record.why else "")


def decide(
    target: TargetArgument,
    strategy: StrategyArgument,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Also write the intervals against both margins as a PNG file.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the decision, and record nothing.")] = False,
    registry: RegistryOption = CHECKOUT_REGISTRY,
) -> None:
    """Decide from the newest report whether the draft in service is kept, tuned or trained anew; starts nothing."""
    from draftworks.decision.deciding import Decider, describe_decision
    from draftworks.decision.record import save_decision
    from draftworks.storage.files import publish_file

    try:
        service = open_service(registry, target, strategy)
        decision = Decider.of(service).decide()
        if not dry_run:
            decision = save_decision(service.artifacts.root, decision)
        typer.echo(describe_decision(decision))
        if picture is not None:
            from draftworks.decision.deciding import plot_decision

            with publish_file(picture) as staging:
                staging.write_bytes(plot_decision(decision))
    except DraftworksError as error:
        raise report_error(error) from None
    except OSError as error:
        raise report_error(DraftworksError(f"{picture}: cannot be written: {error}")) from None


START_NEEDS_DAEMON = (
    "start: decision_sensor starts it while Dagster's daemon runs: draftworks ui, or dagster-daemon run; draftworks doctor "
    "says whether it does"
)


def decisions(registry: RegistryOption = CHECKOUT_REGISTRY) -> None:
    """List every decision with what it waits for, the most urgent first, and what is used of the budget."""
    from draftworks.decision.fleet_state import FleetReader
    from draftworks.decision.queue import Action

    try:
        reader, now = FleetReader(Registry(registry)), time.time()
        state = reader.read(busy={})
        steps = reader.plan(state, now, reader.find_outdated(state.decisions))
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
    from draftworks.decision.record import AnswerFile

    found = Registry(registry)
    found.find_target_file(target)
    return AnswerFile(found.resolve_var_folder())


def _name(who: str | None) -> str:
    from draftworks.service.promotion import name_user

    return who or name_user()
