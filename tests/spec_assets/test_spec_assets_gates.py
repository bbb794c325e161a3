"""A check that `gates:` turns into an error fails the run and prevents the export; the defaults do neither."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from report_folders import ASSET, TARGET, ReportFolders

from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import resolve_strategy
from draftworks.errors import ConfigError
from draftworks.storage.artifacts import Artifact
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from spec_assets.data import check_answers_finished
from spec_assets.gates import NOT_WORSE, GateClosed, check_export_gates, make_gate_checks

SAMPLES = {f"s{index}": [index, 7, 8] for index in range(8)}
GOOD, BAD = dict.fromkeys(SAMPLES, [3, 2]), dict.fromkeys(SAMPLES, [0, 1])
EAGLE3 = resolve_strategy("eagle3")


@pytest.fixture
def worse(site) -> Workspace:
    """A site whose newest draft is accepted less than the one before it."""
    folders = ReportFolders(site.var)
    answers = folders.publish_answers(SAMPLES)
    folders.publish_report("old", answers, GOOD)
    folders.publish_report("new", answers, BAD)
    return Workspace(registry_root=str(site.registry))


def make_gate(site, gates: str) -> TargetSpec:
    site.target_file.write_text(f"{site.target_file.read_text()}gates: {gates}\n")
    return Registry(site.registry).load_target("small")


def checked(registry: Path) -> dg.ExecuteInProcessResult:
    """A report that was made, its checks, and an asset that is made of it."""

    @dg.asset(name=ASSET, partitions_def=dg.StaticPartitionsDefinition([TARGET]))
    def report():
        pass

    @dg.asset(name="leaderboard", deps=[report])
    def follows():
        pass

    defs = dg.Definitions(
        assets=[report, follows],
        asset_checks=[make_gate_checks(ASSET)],
        jobs=[dg.define_asset_job("all", dg.AssetSelection.all())],
        resources={"workspace": Workspace(registry_root=str(registry))},
    )
    return defs.resolve_job_def("all").execute_in_process(partition_key=TARGET, raise_on_error=False)


def test_a_failed_check_is_told_and_stops_nothing_by_default(site, worse):
    assert checked(site.registry).success
    check_export_gates(worse, EAGLE3, worse.registry.load_target("small"))


def test_a_gate_fails_the_run_in_one_line_and_nothing_is_exported(site, worse):
    target = make_gate(site, "{not_worse: error}")
    result = checked(site.registry)
    assert not result.success
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    reason = failed.step_failure_data.user_failure_data.description
    assert reason.startswith(
        "target small: check not_worse failed, which fails the run (gates.not_worse: error): -2.000 accepted"
    )
    assert len(reason.splitlines()) == 1
    shown = {check.check_name: check for check in result.get_asset_check_evaluations()}[NOT_WORSE]
    assert (shown.passed, shown.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert result.asset_materializations_for_node("leaderboard")  # what only shows is made all the same
    with pytest.raises(GateClosed, match="not exported. target small: check not_worse failed"):
        check_export_gates(worse, EAGLE3, target)


def test_a_gate_that_is_passed_lets_the_draft_through(site):
    folders = ReportFolders(site.var)
    answers = folders.publish_answers(SAMPLES)
    for draft, accepted in (("old", BAD), ("new", GOOD)):
        folders.publish_report(draft, answers, accepted)
    target = make_gate(site, "{not_worse: error}")
    assert checked(site.registry).success
    check_export_gates(Workspace(registry_root=str(site.registry)), EAGLE3, target)


@pytest.mark.parametrize(
    ("gates", "reason"),
    [
        ("{beats_baseline: error}", "unknown key gates.beats_baseline; did you mean beats_baselines?"),
        ("{beats_baselines: eror}", "did you mean error?"),
        ("{features_verified: warn}", "unknown key gates.features_verified"),
    ],
)
def test_only_what_is_a_matter_of_judgement_can_be_set(site, gates, reason):
    with pytest.raises(ConfigError, match=reason.replace("?", r"\?")):
        make_gate(site, gates)


@pytest.mark.parametrize(("cut", "passed"), [(415, False), (200, True), (0, True)])
def test_answers_that_are_mostly_cut_are_told(cut, passed):
    summary = {"samples": 415, "unfinished_answers": cut}
    made = Artifact("responses", "t", Path("/nowhere"), {}, "v", summary, {}, 0.0, 0.0)
    target = TargetSpec(name="t", model="m", dataset="d")
    check = check_answers_finished(made, "responses", target)
    assert (check.passed, check.severity) == (passed, dg.AssetCheckSeverity.WARN)
    assert check.description.startswith(f"{cut} of 415 answers were cut off by responses.max_new_tokens (")
