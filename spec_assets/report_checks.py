"""What is asked of a report: steps of their own, so that they are skipped with the report of a target that has none."""

from collections.abc import Sequence

import dagster as dg

from draftworks.strategies import StrategySpec
from resources.workspace import Workspace
from spec_assets.common import checked_partition, clear_errors, told
from spec_assets.reports import scores

BEATS_BASELINES = "beats_baselines"
NOT_WORSE = "not_worse"


def report_checks(strategy: StrategySpec) -> Sequence[dg.AssetChecksDefinition]:
    """The checks of `{strategy}_report`. Neither is a gate: the draft is there, and its report is worth reading."""
    name = f"{strategy.name}_report"
    return [_beats_baselines(name), _not_worse(name)]


def _beats_baselines(report: str) -> dg.AssetChecksDefinition:
    """A warning only: a draft in the making may lose to a table."""

    @dg.asset_check(
        asset=report,
        name=BEATS_BASELINES,
        description="The draft accepts more than a bigram table and than itself untrained.",
    )
    def beats_baselines(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        found = scores(workspace.artifacts.current(report, checked_partition(context)))
        baselines = [score for draft, score in found.items() if draft != "trained"]
        better = bool(found["trained"] > max(baselines))
        return told(context, dg.AssetCheckResult(passed=better, severity=dg.AssetCheckSeverity.WARN, metadata=found))

    return beats_baselines


def _not_worse(report: str) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=report,
        name=NOT_WORSE,
        description="The target accepts no less of the draft per pass (rung 3) than of the draft before it, on the "
        "held-out prompts that both were measured on.",
    )
    def not_worse(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> dg.AssetCheckResult:
        from draftworks.evaluation.comparison import against_replaced

        with clear_errors():
            found = against_replaced(workspace.artifacts, report, checked_partition(context))
        result = dg.AssetCheckResult(
            passed=not found.worse,
            severity=dg.AssetCheckSeverity.ERROR,
            description=found.describe(),
            metadata=found.to_json(),
        )
        return told(context, result)

    return not_worse
