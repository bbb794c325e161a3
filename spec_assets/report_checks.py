"""Checks of reports, as steps of their own: they are skipped when the report is skipped."""

from collections.abc import Iterator, Sequence

import dagster as dg

from draftworks.config.strategies import StrategySpec
from draftworks.storage.asset_names import of_strategy
from resources.workspace import Workspace
from spec_assets.common import read_partition, report_check, translate_errors
from spec_assets.gates import BEATS_BASELINES, NOT_WORSE, REPORT_JUDGES, yield_gated
from spec_assets.reports import list_draft_changes

DRAFT_IS_CURRENT = "draft_is_current"

MEANINGS = {
    BEATS_BASELINES: "The draft accepts more than a bigram table and than itself untrained.",
    NOT_WORSE: "The target accepts no less of the draft per pass (rung 3) than of the draft before it, on the held-out prompts "
    "that both were measured on.",
}


def make_report_checks(strategy: StrategySpec) -> Sequence[dg.AssetChecksDefinition]:
    """Return the checks of `{strategy}_report`. They fail a run only if the target's `gates` say so."""
    report = of_strategy(strategy.name).report
    return [*make_gate_checks(report), _make_draft_is_current(strategy, report)]


def make_gate_checks(report: str) -> list[dg.AssetChecksDefinition]:
    """Return the checks of a report that a target's `gates` can turn into errors."""
    return [_make_report_check(report, name) for name in REPORT_JUDGES]


def _make_report_check(report: str, name: str) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=report, name=name, description=MEANINGS[name])  # pyright: ignore[reportArgumentType] - a generator
    def check(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> Iterator[dg.AssetCheckResult]:
        target = read_partition(context)
        with translate_errors():
            result = REPORT_JUDGES[name](workspace, report, target)
            yield from yield_gated(context, workspace.registry.load_target(target), name, result)

    return check


def _make_draft_is_current(strategy: StrategySpec, report: str) -> dg.AssetChecksDefinition:
    """Return the check `draft_is_current`, a warning: a new report may be of a draft that was trained for other
    weights."""

    @dg.asset_check(
        asset=report,
        name=DRAFT_IS_CURRENT,
        description="The draft was trained for the target, the data and the recipe that are there now; if not, train it again.",
    )
    def draft_is_current(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        target = read_partition(context)
        with translate_errors():
            draft = workspace.artifacts.load_current(of_strategy(strategy.name).draft, target)
            changes = list_draft_changes(workspace, draft, workspace.registry.load_target(target))
        result = dg.AssetCheckResult(
            passed=not changes,
            severity=dg.AssetCheckSeverity.WARN,
            description="trained for what is there now"
            if not changes
            else f"changed since it was trained: {'; '.join(changes)}. Run the job train_{strategy.name}",
        )
        return report_check(context, result)

    return draft_is_current
