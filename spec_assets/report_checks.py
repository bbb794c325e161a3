"""Checks of a report, as one step of its own: they are skipped when the report is skipped."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import dagster as dg

from draftworks.config.strategies import StrategySpec
from draftworks.errors import DraftworksError
from draftworks.storage.asset_names import of_strategy
from resources.workspace import Workspace
from spec_assets.common import read_partition, report_check, translate_errors
from spec_assets.gates import BEATS_BASELINES, NOT_WORSE, REPORT_JUDGES, as_gate, find_refusal
from spec_assets.reports import list_draft_changes

DRAFT_IS_CURRENT = "draft_is_current"

MEANINGS = {
    BEATS_BASELINES: "The draft accepts more than a bigram table and than itself untrained.",
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
