"""What is asked of a report: steps of their own, so that they are skipped with the report of a target that has none."""

from collections.abc import Iterator, Sequence

import dagster as dg

from draftworks.strategies import StrategySpec
from resources.workspace import Workspace
from spec_assets.common import checked_partition, clear_errors
from spec_assets.gates import BEATS_BASELINES, NOT_WORSE, REPORT_JUDGES, gated

MEANINGS = {
    BEATS_BASELINES: "The draft accepts more than a bigram table and than itself untrained.",
    NOT_WORSE: "The target accepts no less of the draft per pass (rung 3) than of the draft before it, on the held-out prompts "
    "that both were measured on.",
}


def report_checks(strategy: StrategySpec) -> Sequence[dg.AssetChecksDefinition]:
    """The checks of `{strategy}_report`. The draft is there, and its report is worth reading: they end a run only where the
    target says so (`gates`)."""
    return [_report_check(f"{strategy.name}_report", name) for name in REPORT_JUDGES]


def _report_check(report: str, name: str) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=report, name=name, description=MEANINGS[name])
    def check(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> Iterator[dg.AssetCheckResult]:
        target = checked_partition(context)
        with clear_errors():
            result = REPORT_JUDGES[name](workspace, report, target)
            yield from gated(context, workspace.registry.target(target), name, result)

    return check
