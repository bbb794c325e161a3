"""Checks that the registry can make gates (`gates:` of a target): they fail the run, and what does not pass is not exported.

Not by Dagster's blocking checks: those would keep the leaderboard from being made too, and let through whoever
materializes only the export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import StrategySpec
from draftworks.errors import DraftworksError
from draftworks.storage.asset_names import of_strategy
from resources.workspace import Workspace
from spec_assets.common import told
from spec_assets.reports import scores

BEATS_BASELINES = "beats_baselines"
NOT_WORSE = "not_worse"


class GateClosed(DraftworksError):
    """Something is not made because it did not pass a gate."""


def gated(
    context: dg.AssetCheckExecutionContext, target: TargetSpec, gate: str, result: dg.AssetCheckResult
) -> Iterator[dg.AssetCheckResult]:
    """The result of a check, and then the failure of its step where the target makes it a gate.

    Raises:
        GateClosed: the check failed, and `gates` says error.
    """
    closed = not result.passed and getattr(target.gates, gate) == "error"
    yield told(context, result._replace(severity=dg.AssetCheckSeverity.ERROR) if closed else result)
    if closed:
        raise GateClosed(refusal(target, gate, result))


def refusal(target: TargetSpec, gate: str, result: dg.AssetCheckResult) -> str:
    return (
        f"target {target.name}: check {gate} failed, which fails the run (gates.{gate}: error): {result.description}. Train a "
        f"better draft, or set gates.{gate} to warn"
    )


def check_export_gates(workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> None:
    """Look at the report of the draft that is to be exported; gates that only warn let everything through.

    Raises:
        GateClosed: the report does not pass one of them.
        StoreError: there is no report, or it is damaged.
    """
    for gate, judge in REPORT_JUDGES.items():
        if getattr(target.gates, gate) == "error":
            result = judge(workspace, of_strategy(strategy.name).report, target.name)
            if not result.passed:
                raise GateClosed(f"not exported. {refusal(target, gate, result)}")


def beats_baselines(workspace: Workspace, report: str, target: str) -> dg.AssetCheckResult:
    """Whether the draft of a report accepts more than what costs nothing. A draft in the making may lose to a table."""
    found = scores(workspace.artifacts.load_current(report, target))
    drafts = dict(found)
    trained = drafts.pop("trained")
    best = max(drafts, key=lambda name: drafts[name])
    return dg.AssetCheckResult(
        passed=bool(trained > drafts[best]),
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{trained:.3f} accepted tokens per pass (simulated), {best}: {drafts[best]:.3f}",
        metadata=found,
    )


def not_worse(workspace: Workspace, report: str, target: str) -> dg.AssetCheckResult:
    """Whether the draft of a report is accepted no less than the one it replaces."""
    from draftworks.evaluation.report.comparison import compare_with_replaced_draft

    found = compare_with_replaced_draft(workspace.artifacts, report, target)
    return dg.AssetCheckResult(
        passed=not found.is_worse,
        severity=dg.AssetCheckSeverity.ERROR,
        description=found.describe(),
        metadata=found.to_json(),
    )


REPORT_JUDGES: dict[str, Callable[[Workspace, str, str], dg.AssetCheckResult]] = {
    BEATS_BASELINES: beats_baselines,
    NOT_WORSE: not_worse,
}
"""What a report is judged by before its draft is exported."""
