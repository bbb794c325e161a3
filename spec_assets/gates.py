"""Checks of reports, as Dagster shows them, and those that a target's `gates:` turns into errors.

They are not blocking checks of Dagster, which would prevent the leaderboard too, and would not prevent an export that is
materialized alone.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import dagster as dg

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import StrategySpec
from draftworks.errors import DraftworksError
from draftworks.evaluation.acceptance_length import NAME, count_own_token, format_length
from draftworks.evaluation.report.summary import ReportSummary
from draftworks.storage.artifacts import Artifact
from draftworks.storage.names import HELDOUT, of_strategy
from resources.workspace import Workspace
from spec_assets.common import read_partition, report_check, translate_errors
from spec_assets.metadata import SIMULATED, WALK
from spec_assets.reports import list_draft_changes, read_scores

BEATS_BASELINES = "beats_baselines"
NOT_WORSE = "not_worse"


class GateClosed(DraftworksError):
    """Raised where a failed gate stops an export."""


def yield_gated(
    context: dg.AssetCheckExecutionContext, target: TargetSpec, gate: str, result: dg.AssetCheckResult
) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of a check; then fail the step if the target makes this check a gate.

    Raises:
        GateClosed: the check failed, and `gates` says error.
    """
    refusal = find_refusal(target, gate, result)
    yield report_check(context, as_gate(result, refusal))
    if refusal is not None:
        raise GateClosed(refusal)


def as_gate(result: dg.AssetCheckResult, refusal: str | None) -> dg.AssetCheckResult:
    """Return a check's result as an error if it fails the run."""
    return result if refusal is None else result._replace(severity=dg.AssetCheckSeverity.ERROR)


def find_refusal(target: TargetSpec, gate: str, result: dg.AssetCheckResult) -> str | None:
    """Return why a check's result fails the run: it failed, and the target's `gates` say error; else None."""
    closed = not result.passed and getattr(target.gates, gate, None) == "error"
    return explain_refusal(target, gate, result) if closed else None


def explain_refusal(target: TargetSpec, gate: str, result: dg.AssetCheckResult) -> str:
    return (
        f"target {target.name}: check {gate} failed, which fails the run (gates.{gate}: error): {result.description}. Train a "
        f"better draft, or set gates.{gate} to warn"
    )


def check_export_gates(workspace: Workspace, strategy: StrategySpec, target: TargetSpec) -> None:
    """Check the gates of the report before its draft is exported; gates that only warn are not checked.

    Raises:
        GateClosed: the report does not pass one of them.
        StoreError: there is no report, or it is damaged.
    """
    for gate, judge in REPORT_JUDGES.items():
        if getattr(target.gates, gate) == "error":
            result = judge(workspace, of_strategy(strategy.name).report, target.name)
            refusal = find_refusal(target, gate, result)
            if refusal is not None:
                raise GateClosed(f"not exported. {refusal}")


def judge_baselines(workspace: Workspace, report: str, target: str) -> dg.AssetCheckResult:
    """Compare the trained draft with the best of what costs nothing, on the walk; `heldout` decides, all sets are told.

    A report without such walks is of before there were any: simulated lengths are compared then.
    """
    made = workspace.artifacts.load_current(report, target)
    verdicts = ReportSummary.load_verdicts(made)
    if HELDOUT in verdicts:
        return dg.AssetCheckResult(
            passed=verdicts[HELDOUT].beats_it,
            severity=dg.AssetCheckSeverity.WARN,
            description=". ".join(f"{name}: {one.describe()}" for name, one in verdicts.items()),
            metadata=describe_lengths(made, WALK),
        )
    found = read_scores(made, SIMULATED)
    drafts = dict(found)
    trained = drafts.pop("trained")
    best = max(drafts, key=lambda name: drafts[name])
    return dg.AssetCheckResult(
        passed=bool(trained > drafts[best]),
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{NAME} {format_length(trained, 3)} (simulated), {best}: {format_length(drafts[best], 3)}",
        metadata=describe_lengths(made, SIMULATED),
    )


def describe_lengths(report: Artifact, metric: str) -> dict[str, float]:
    """Return the acceptance length of every draft of a report that has the metric."""
    return {f"acceptance_length_{name}": count_own_token(value) for name, value in read_scores(report, metric).items()}


def judge_against_replaced(workspace: Workspace, report: str, target: str) -> dg.AssetCheckResult:
    """Compare the draft with the one that it replaces, on the prompts that both were measured on."""
    from draftworks.evaluation.report.comparison import compare_with_replaced_draft

    found = compare_with_replaced_draft(workspace.artifacts, report, target)
    return dg.AssetCheckResult(
        passed=not found.is_worse,
        severity=dg.AssetCheckSeverity.ERROR,
        description=found.describe(),
        metadata=found.to_json(),
    )


REPORT_JUDGES: dict[str, Callable[[Workspace, str, str], dg.AssetCheckResult]] = {
    BEATS_BASELINES: judge_baselines,
    NOT_WORSE: judge_against_replaced,
}
"""Checks of a report that can be gates of its export, by name."""

DRAFT_IS_CURRENT = "draft_is_current"

MEANINGS = {
    BEATS_BASELINES: "The target accepts more of the draft per pass (rung 3) than of anything that costs nothing: itself "
    "untrained, bigrams, prompt lookup, suffix decoding; on the held-out prompts.",
    NOT_WORSE: "The target accepts no less of the draft per pass (rung 3) than of the draft before it, on the held-out prompts "
    "that both were measured on.",
    DRAFT_IS_CURRENT: "The draft was trained for the target, the data and the recipe that are there now; if not, train it "
    "again.",
}
Judge = Callable[[Workspace, str, str], dg.AssetCheckResult]
"""Of a workspace, the name of the report and that of the target."""


def make_report_checks(strategy: StrategySpec) -> dg.AssetChecksDefinition:
    """Return the checks of `{strategy}_report`. They fail a run only if the target's `gates` say so."""
    judges = {**REPORT_JUDGES, DRAFT_IS_CURRENT: partial(judge_draft_is_current, strategy)}
    return _make_checks(of_strategy(strategy.name).report, judges)


def make_gate_checks(report: str) -> dg.AssetChecksDefinition:
    """Return the checks of a report that a target's `gates` can turn into errors."""
    return _make_checks(report, REPORT_JUDGES)


def _make_checks(report: str, judges: Mapping[str, Judge]) -> dg.AssetChecksDefinition:
    """Return one step for all checks: a process for each would cost more than what they do."""
    specs = [dg.AssetCheckSpec(name, asset=report, description=MEANINGS[name]) for name in judges]

    @dg.multi_asset_check(name=f"{report}_checks", specs=specs, can_subset=True)
    def checks(context: dg.AssetCheckExecutionContext, workspace: Workspace) -> Iterator[dg.AssetCheckResult]:
        wanted = {key.name for key in context.selected_asset_check_keys}
        failed: list[str] = []
        with translate_errors():
            target = workspace.registry.load_target(read_partition(context))
            for name in (name for name in judges if name in wanted):
                try:
                    result = judges[name](workspace, report, target.name)
                except DraftworksError as error:  # what one cannot read does not keep the others from being told
                    failed.append(str(error))
                    continue
                refusal = find_refusal(target, name, result)
                named = as_gate(result, refusal)._replace(asset_key=dg.AssetKey(report), check_name=name)
                yield report_check(context, named)
                failed += [] if refusal is None else [refusal]
            if failed:
                raise DraftworksError("\n".join(failed))

    return checks


def judge_draft_is_current(
    strategy: StrategySpec, workspace: Workspace, report: str, target: str
) -> dg.AssetCheckResult:
    """Compare what the newest draft was made from with what is there now; a new report may be of a draft that was trained
    for other weights."""
    draft = workspace.artifacts.load_current(of_strategy(strategy.name).draft, target)
    changes = list_draft_changes(workspace, draft, workspace.registry.load_target(target))
    return dg.AssetCheckResult(
        passed=not changes,
        severity=dg.AssetCheckSeverity.WARN,
        description="trained for what is there now"
        if not changes
        else f"changed since it was trained: {'; '.join(changes)}. Run the job train_{strategy.name}",
    )
