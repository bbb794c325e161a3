"""The assets `{strategy}_promoted`: the draft in service of a target. They exist where a registry entry has `service:`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import dagster as dg

from draftworks.config.strategies import StrategySpec
from draftworks.errors import ConfigError, DraftworksError
from draftworks.evaluation.acceptance_length import SYMBOL, format_change, format_length
from draftworks.service.register import EvalFigures, InService
from draftworks.storage.identity import digest
from draftworks.storage.names import TARGET_MODEL, of_strategy
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from spec_assets.common import NothingToDo, asset, read_partition, report_check, require_target, translate_errors
from spec_assets.metadata import format_table, round_figures

if TYPE_CHECKING:
    from draftworks.service.promotion import Service

GROUP = "service"
NEWEST_IN_SERVICE = "newest_in_service"
PROMOTE, ROLLBACK = "promote", "rollback"


class ServiceConfig(dg.Config):
    """What a run asks for; by default what the target's `service` section says."""

    action: str = ""
    """`promote`, `rollback`, or nothing: promote where the section says `automatic`."""
    draft: str = ""
    """Digest of a draft; by default the newest, or for a rollback the one before."""
    expect: str = ""
    """Digest of the draft that is replaced: with another one in service nothing is done."""
    who: str = ""
    why: str = ""
    force: bool = False
    canary: float = 0.0
    """Share of the requests for a canary; 0: the draft gets all of them."""


def list_promoted_strategies(registry: Registry) -> list[str]:
    """Return the strategies of the targets whose entry has a `service` section. Other entries are not parsed."""
    return list_strategies_with(registry, "service")


def list_strategies_with(registry: Registry, section: str) -> list[str]:
    """Return the strategies of the targets whose entry has an optional section. Entries without the word are not
    parsed."""
    found: set[str] = set()
    for name in registry.list_targets_with(section):
        try:
            target = registry.load_target(name)
        except DraftworksError:
            continue  # its first step says what is wrong with it
        if getattr(target, section) is not None:
            found.update(target.strategies)
    return sorted(found)


def make_promoted_asset(strategy: StrategySpec) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_promoted`, for targets with `service`."""
    names = of_strategy(strategy.name)

    @asset(
        group=GROUP,
        kinds=["json"],
        name=names.promoted,
        description=f"The {strategy.name} draft that servers are to use: put into service if it is not inferior to the best "
        "one that was, on every eval set, and its exports pass.",
        deps=[TARGET_MODEL, names.draft, names.report, names.export, names.serving],
        optional=True,
    )
    def promoted(
        context: dg.AssetExecutionContext, workspace: Workspace, config: ServiceConfig
    ) -> dg.MaterializeResult:
        target = require_target(context, workspace)
        service = open_service(workspace, strategy.name, target.name)
        record = _act(context, service, config)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(digest([record.number, record.draft.digest])),
            metadata=round_figures(describe_service(service, record)),
        )

    return promoted


def make_promoted_check(strategy: StrategySpec) -> dg.AssetChecksDefinition:
    """Return the check `newest_in_service`, a warning: the newest draft may not be the best one."""
    name = of_strategy(strategy.name).promoted

    @dg.asset_check(
        asset=name,
        name=NEWEST_IN_SERVICE,
        description="The newest draft is in service; if not, what the rule says of it.",
    )
    def newest_in_service(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        from draftworks.service.candidate import RefusedError

        with translate_errors():
            try:
                judged = open_service(workspace, strategy.name, read_partition(context)).judge()
                passed, said = judged.is_in_service, judged.describe()
            except RefusedError as error:
                passed, said = False, str(error)
        return report_check(
            context, dg.AssetCheckResult(passed=passed, severity=dg.AssetCheckSeverity.WARN, description=said)
        )

    return newest_in_service


def make_service_jobs(strategies: Iterable[str]) -> list[Any]:
    """Return the jobs `promote_{strategy}` and `rollback_{strategy}`."""
    descriptions = {
        PROMOTE: "Put the newest draft into service, if the rule of promotion accepts it; otherwise the run fails.",
        ROLLBACK: "Take back the last promotion: end a canary, or put the draft before it into service.",
    }
    return [
        dg.define_asset_job(
            f"{action}_{strategy}",
            selection=dg.AssetSelection.assets(of_strategy(strategy).promoted),
            description=description,
            config={"ops": {of_strategy(strategy).promoted: {"config": {"action": action}}}},
        )
        for strategy in strategies
        for action, description in descriptions.items()
    ]


def open_service(workspace: Workspace, strategy: str, target: str) -> "Service":
    """Return the drafts of a strategy of a target, and the one in service."""
    from draftworks.service.promotion import Service

    registry, files = workspace.registry, workspace.resolve_target_files(target)
    return Service(registry, registry.load_target(target), files, strategy, workspace.artifacts)


def _act(context: dg.AssetExecutionContext, service: "Service", config: ServiceConfig) -> InService:
    """Do what the run asks for, and return the record that is then in service.

    Raises:
        NothingToDo: nothing is in service, and nobody asked for a promotion that was refused.
        DraftworksError: what was asked for was refused.
    """
    from draftworks.service.candidate import RefusedError
    from draftworks.service.promotion import Request
    from draftworks.service.swap_record import find_taken_back

    if config.action not in ("", PROMOTE, ROLLBACK):
        raise ConfigError(f"action: expected {PROMOTE} or {ROLLBACK}, found {config.action!r}")
    request = Request(
        who=config.who or f"run {context.run.run_id}",
        why=config.why or ("" if config.action else "the rule accepts it"),
        expected=config.expect or None,
        force=config.force,
        share=config.canary or None,
    )
    if config.action == ROLLBACK:
        record = service.rollback(request, config.draft or None)
    else:
        try:
            judgement = service.judge(config.draft or None)
            for line in judgement.describe().splitlines():
                context.log.info(line)
            taken_back = find_taken_back(service.register, judgement.candidate.served.digest)
            if taken_back is not None and not config.action and not judgement.is_in_service:
                context.log.warning(f"not promoted again: {taken_back.describe()}. {_say_how(service)}")
                record = service.register.find()
            elif config.action or service.settings.automatic or judgement.is_in_service:
                record = service.promote(judgement, request)
            else:
                service.accept(judgement)
                record = service.register.find()
                context.log.info(f"accepted. {_say_how(service)}")
        except RefusedError as error:
            if config.action:
                raise
            context.log.warning(str(error))
            record = service.register.find()
    if record is None:
        raise NothingToDo(f"target {service.target.name} has no {service.strategy} draft in service")
    record = _swap(context, service, record, request.who)
    _tell(context, service, record)
    return record


def _say_how(service: "Service") -> str:
    return f"To promote it: draftworks promote {service.target.name} {service.strategy}"


def _swap(context: dg.AssetExecutionContext, service: "Service", record: InService, who: str) -> InService:
    """Have the target's running server load what is in service; return the record after it."""
    if service.settings.swap is None:
        return record
    from draftworks.swap.swapping import swap

    done = swap(service, record, who, context.log.info)
    if done.result is not None:
        log = context.log.info if done.result.outcome.serves else context.log.warning
        log(done.result.describe())
    return done.record


def _tell(context: dg.AssetExecutionContext, service: "Service", record: InService) -> None:
    """Call the hook, unless it has succeeded for this record; its failure is a warning, as the draft is in service."""
    from draftworks.service.hook import describe_delivery, tell_servers

    if service.settings.hook is None:
        return
    delivery = tell_servers(service.register, record, service.settings.hook)
    log = context.log.info if delivery.told else context.log.warning
    log(describe_delivery(delivery))


def describe_service(service: "Service", record: InService) -> dict[str, Any]:
    """Return metadata: who, when, why, states, and the figures of the draft or its canary beside what it replaces."""
    from draftworks.service.candidate import find_delivery, read_states
    from draftworks.service.hook import describe_delivery
    from draftworks.service.swap_record import find_swap

    states = read_states(service.register)
    delivery, swapped = find_delivery(service.register, record), find_swap(service.register, record)
    metadata: dict[str, Any] = {
        "draft": record.draft.digest,
        "state": states[record.draft.digest].value,
        "action": record.action,
        "number": record.number,
        "who": record.who,
        "when": record.when,
        "why": record.why,
        "forced": record.forced,
        "previous": record.previous or "none",
        "path": dg.MetadataValue.path(record.draft.path),
        "figures": format_table(FIGURE_COLUMNS, map(_format_row, record.figures)),
    }
    accepted = [name for name, state in states.items() if state == "accepted"]
    if accepted:
        metadata["accepted"] = accepted[0]
    if record.canary is not None:
        metadata |= {"canary": record.canary.draft.digest, "canary_share": record.canary.share}
    if record.draft.bundle is not None:
        metadata |= {
            "bundle": record.draft.bundle.digest,
            "bundle_path": dg.MetadataValue.path(record.draft.bundle.path),
        }
    if swapped is not None:
        metadata["server"] = swapped.describe()
    if delivery is not None:
        metadata["hook"] = describe_delivery(delivery)
    return metadata


FIGURE_COLUMNS = (
    "eval set",
    "verdict",
    f"{SYMBOL} promoted, or canary",
    f"{SYMBOL} compared with",
    "difference",
    "interval",
    "margin",
    "draft",
    "lost slices",
)


def _format_row(one: EvalFigures) -> tuple[object, ...]:
    interval = "" if one.low is None or one.high is None else f"{one.low:+.3f} to {one.high:+.3f}"
    lengths = (format_length(each, 3, none="") for each in (one.value, one.reference_value))
    difference = "" if one.difference is None else format_change(one.difference)
    lost = ", ".join(f"{each.column} {each.value} {format_change(each.difference)}" for each in one.slices)
    return (one.eval_set, one.verdict, *lengths, difference, interval, f"{one.margin:g}", one.reference or "", lost)
