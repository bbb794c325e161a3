"""The commands `draftworks promote`, `rollback` and `in-service`: which draft the servers of a target are to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.programs.start import CHECKOUT_REGISTRY, RegistryOption, report_error
from draftworks.service.record import InService
from draftworks.service.register import ServiceRegister
from draftworks.service.resolve import resolve_draft
from draftworks.service.rule import describe_figures
from draftworks.service.states import find_delivery, read_states
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.asset_names import of_strategy
from draftworks.storage.identity import FileDigests
from draftworks.storage.suggestions import suggest_or_list
from draftworks.targets.registry import Registry

if TYPE_CHECKING:
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
        told = tell(service, record)
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
        told = tell(service, record)
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
        delivery = find_delivery(register, record)
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
    return said + (f": {record.why}" if record.why else "")
