"""The assets `{strategy}_decision`: keep, tune or retrain the draft in service. They exist where an entry has
`decision:`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import dagster as dg

from draftworks.config.strategies import StrategySpec
from draftworks.evaluation.acceptance_length import SYMBOL, format_length
from draftworks.storage.identity import digest
from draftworks.storage.names import DATASET, RECIPE, TARGET_MODEL, of_eval_set, of_strategy
from draftworks.targets.registry import HELDOUT, Registry
from resources.workspace import Workspace
from spec_assets.common import NothingToDo, asset, require_target
from spec_assets.evals import EvalUsers, depend_on_eval_sets
from spec_assets.metadata import embed_png, format_table, round_figures
from spec_assets.promotion import GROUP, list_strategies_with, open_service

if TYPE_CHECKING:
    from draftworks.decision.record import Decision, EvalLoss

DECIDE = "decide"


def list_decided_strategies(registry: Registry) -> list[str]:
    """Return the strategies of the targets whose entry has a `decision` section. Other entries are not parsed."""
    return list_strategies_with(registry, "decision")


def make_decision_asset(strategy: StrategySpec, evals: EvalUsers) -> dg.AssetsDefinition:
    """Make the asset `{strategy}_decision`, for targets with `decision`.

    Args:
        evals: targets by the eval set that they list.
    """
    names = of_strategy(strategy.name)
    eval_assets = [*of_eval_set(HELDOUT), *depend_on_eval_sets(evals, tuple)]

    @asset(
        group=GROUP,
        kinds=["json"],
        name=names.decision,
        description=f"Whether the {strategy.name} draft in service is kept, tuned or trained anew: its loss since it was put "
        "into service against two margins.",
        deps=[
            TARGET_MODEL,
            DATASET,
            RECIPE,
            names.draft,
            names.report,
            names.export,
            names.serving,
            names.promoted,
            *eval_assets,
        ],
        optional=True,
    )
    def decision(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
        from draftworks.decision.deciding import Decider, describe_decision
        from draftworks.decision.figures import NotMeasuredError
        from draftworks.decision.record import save_decision

        target = require_target(context, workspace)
        service = open_service(workspace, strategy.name, target.name)
        if service.register.find() is None:
            raise NothingToDo(f"target {target.name} has no {strategy.name} draft in service")
        try:
            made = Decider.of(service).decide()
        except NotMeasuredError as error:
            context.log.warning(str(error))
            raise NothingToDo(f"target {target.name}: nothing is decided") from None
        made = save_decision(workspace.artifacts.root, made)
        for line in describe_decision(made).splitlines():
            context.log.info(line)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(digest([made.subject, made.choice])),
            metadata=round_figures(describe_metadata(made)),
        )

    return decision


def make_decision_jobs(strategies: Iterable[str]) -> list[Any]:
    """Return the jobs `decide_{strategy}`."""
    return [
        dg.define_asset_job(
            f"{DECIDE}_{strategy}",
            selection=dg.AssetSelection.assets(of_strategy(strategy).decision),
            description="Decide from the newest report whether the draft in service is kept, tuned or trained anew.",
        )
        for strategy in strategies
    ]


def describe_metadata(decision: "Decision") -> dict[str, Any]:
    """Return metadata: the choice, why, figures, costs, and a picture of the intervals against the margins."""
    from draftworks.decision.deciding import MEANINGS, format_hours, plot_decision

    metadata: dict[str, Any] = {
        "choice": decision.choice.value,
        "meaning": MEANINGS[decision.choice],
        "why": dg.MetadataValue.md("\n".join(f"* {reason}" for reason in decision.reasons)),
        "draft": decision.draft,
        "largest_loss": decision.largest_loss,
        "tune_margin": decision.margins.tune,
        "retrain_margin": decision.margins.retrain,
        "figures": format_table(FIGURE_COLUMNS, map(_format_row, decision.figures)),
        "cost_of_tune": format_hours(decision.costs.tune),
        "cost_of_retrain": format_hours(decision.costs.retrain),
        "subject": decision.subject,
        "number": decision.number,
        "when": decision.when,
        "picture": embed_png(plot_decision(decision), "loss on each eval set against the margins"),
    }
    if decision.after_tune is not None:
        metadata["after_tune"] = decision.after_tune
    return metadata


FIGURE_COLUMNS = (
    "eval set",
    "choice",
    f"{SYMBOL} now",
    f"{SYMBOL} reference",
    "loss",
    "interval",
    "prompts",
    "compared with",
    "draft",
)


def _format_row(one: "EvalLoss") -> tuple[object, ...]:
    from draftworks.decision.deciding import REFERENCES

    interval = "" if one.low is None or one.high is None else f"{one.low:+.3f} to {one.high:+.3f}"
    value, reference = (format_length(each, 3, none="") for each in (one.value, one.reference_value))
    loss = "" if one.loss is None else f"{one.loss:+.3f}"
    compared = REFERENCES[one.reference]
    return (
        one.eval_set,
        one.choice.value,
        value,
        reference,
        loss,
        interval,
        one.prompts,
        compared,
        one.reference_draft or "",
    )
