"""The checks of a report show a draft that is accepted less than the one it replaces."""

from pathlib import Path

import dagster as dg
import pytest
from report_folders import ASSET, TARGET, ReportFolders

from resources.workspace import Workspace
from spec_assets.gates import BEATS_BASELINES, NOT_WORSE, make_gate_checks

SAMPLES = {f"s{index}": [index, 7, 8] for index in range(8)}
GOOD, BAD = dict.fromkeys(SAMPLES, [3, 2]), dict.fromkeys(SAMPLES, [0, 1])


@pytest.fixture
def folders(site) -> ReportFolders:
    return ReportFolders(site.var)


def evaluated(registry: Path, made: bool = True) -> dict[str, dg.AssetCheckEvaluation]:
    """The checks of a report, run after a step that says it has made one."""

    @dg.asset(name=ASSET, partitions_def=dg.StaticPartitionsDefinition([TARGET]), output_required=False)
    def report():
        if made:
            yield dg.MaterializeResult()

    defs = dg.Definitions(
        assets=[report],
        asset_checks=[make_gate_checks(ASSET)],
        jobs=[dg.define_asset_job("all", dg.AssetSelection.all())],
        resources={"workspace": Workspace(registry_root=str(registry))},
    )
    result = defs.resolve_job_def("all").execute_in_process(partition_key=TARGET)
    assert result.success
    return {check.check_name: check for check in result.get_asset_check_evaluations()}


def test_a_draft_that_is_accepted_less_than_the_one_before_fails_the_check(site, folders: ReportFolders):
    answers = folders.publish_answers(SAMPLES)
    folders.publish_report("old", answers, GOOD)
    folders.publish_report("new", answers, BAD)
    check = evaluated(site.registry)[NOT_WORSE]
    assert (check.passed, check.severity, check.blocking) == (False, dg.AssetCheckSeverity.ERROR, False)
    shown = {name: value.value for name, value in check.metadata.items()}
    assert (shown["draft"], shown["draft_before"], shown["prompts"]) == ("new", "old", 8)
    assert shown["difference"] == -2.0
    assert shown["high"] < 0
    assert "-2.000 accepted tokens per pass" in check.description


def test_a_draft_that_is_accepted_as_much_passes(site, folders: ReportFolders):
    answers = folders.publish_answers(SAMPLES)
    for draft in ("old", "new"):
        folders.publish_report(draft, answers, GOOD)
    check = evaluated(site.registry)[NOT_WORSE]
    assert check.passed
    assert check.metadata["difference"].value == 0.0


def test_a_first_draft_passes_and_says_so(site, folders: ReportFolders):
    folders.publish_report("first", folders.publish_answers(SAMPLES), GOOD)
    check = evaluated(site.registry)[NOT_WORSE]
    assert check.passed
    assert "first draft" in check.description


TASKS = {name: "copy" if index < 5 else "chat" for index, name in enumerate(SAMPLES)}
COPIES = {name: [3, index % 2] if index < 5 else [0, 0] for index, name in enumerate(SAMPLES)}


@pytest.mark.parametrize(("mine", "passed"), [([2, 1], True), ([0, 1], False)])
def test_the_best_that_costs_nothing_decides_and_the_slices_that_are_lost_are_named(
    mine: list[int], passed: bool, site, folders: ReportFolders
):
    answers = folders.publish_answers(SAMPLES)
    accepted = {name: [0, 0] if task == "copy" and passed else mine for name, task in TASKS.items()}
    accepted |= {"s7": [9, 9]} if passed else {}
    folders.publish_report("mine", answers, accepted, draft_tokens=9, lookup=COPIES, tasks=TASKS)
    check = evaluated(site.registry)[BEATS_BASELINES]
    assert (check.passed, check.severity) == (passed, dg.AssetCheckSeverity.WARN)
    assert "of lookup, the best that costs nothing" in check.description
    assert "It loses to what costs nothing in task copy (" in check.description
    assert check.metadata["acceptance_length_lookup"].value == 2.062  # 17 accepted in 16 passes


def test_a_report_from_before_prompt_lookup_is_judged_by_simulated_lengths(site, folders: ReportFolders):
    folders.publish_report("old", folders.publish_answers(SAMPLES), GOOD)
    check = evaluated(site.registry)[BEATS_BASELINES]
    assert not check.passed  # the toy's two drafts are alike
    assert check.description == "acceptance length τ 2.200 (simulated), untrained: 2.200"


def test_both_checks_look_at_a_report_and_at_none_where_none_was_made(site, folders: ReportFolders):
    folders.publish_report("first", folders.publish_answers(SAMPLES), GOOD)
    assert set(evaluated(site.registry)) == {BEATS_BASELINES, NOT_WORSE}
    assert evaluated(site.registry, made=False) == {}
