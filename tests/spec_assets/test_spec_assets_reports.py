"""Reports measure the drafts that exist and skip strategies without one."""

from __future__ import annotations

import shutil

import dagster as dg

from draftworks.config.strategies import resolve_strategy
from draftworks.evaluation.labels import Exactness
from draftworks.evaluation.report.summary import ReportSummary
from draftworks.storage.artifacts import Artifact, BuildResult
from resources.workspace import Workspace
from spec_assets.drafts import describe_draft
from spec_assets.reports import ReportSubject, describe_report


def made(result: dg.ExecuteInProcessResult) -> set[str]:
    return {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}


def test_evaluating_a_strategy_without_a_draft_yields_no_report_and_says_why(finished_site, tmp_path, capfd):
    site = finished_site.copy(tmp_path)
    for name in ("eagle3_draft", "eagle3_report"):
        shutil.rmtree(site.var / name)
    result = site.run("evaluate")
    assert result.success
    assert "heldout_eval_features" in made(result)
    assert "eagle3_report" not in made(result)
    assert "target small has no eagle3 draft yet: nothing to do" in capfd.readouterr().err
    assert not any(check.asset_key == dg.AssetKey("eagle3_report") for check in result.get_asset_check_evaluations())


def test_the_pages_of_report_and_draft_begin_with_the_walk_and_say_no_figure_twice(finished_site, tmp_path):
    artifacts = Workspace(registry_root=str(finished_site.copy(tmp_path).registry)).artifacts
    report = describe_report(artifacts.load_current("eagle3_report", "small"), "eagle3")
    draft = describe_draft(artifacts.load_current("eagle3_draft", "small"))
    assert next(iter(report)) == "walk_acceptance_length"
    assert "simulated_acceptance_length_trained" not in report
    assert {"simulated_acceptance_length_untrained", "report", "acceptance", "model_card"} <= report.keys()
    assert list(draft)[0].endswith("_acceptance_length")
    assert list(draft).index("curves") < list(draft).index("steps")


def test_equal_weights_with_other_options_are_measured_again(finished_site, tmp_path):
    """A draft that is published without training shares the weights of another, but may propose other tokens."""
    workspace = Workspace(registry_root=str(finished_site.copy(tmp_path).registry))
    target, strategy = workspace.registry.load_target("small"), resolve_strategy("eagle3")
    measured = ReportSubject.of(workspace, strategy, target)
    report = workspace.artifacts.load_current("eagle3_report", "small")
    assert measured.to_identity(workspace).to_json().items() <= report.identity.items()

    republish(workspace, measured.draft, options={**measured.draft.identity["options"], "step_decay": 0.5})
    identity = ReportSubject.of(workspace, strategy, target).to_identity(workspace).to_json()
    assert identity["draft"] == report.identity["draft"]
    assert {name for name, value in identity.items() if value != report.identity[name]} == {"draft_identity"}


def test_a_report_knows_that_the_target_wrote_the_answers(finished_site):
    workspace = Workspace(registry_root=str(finished_site.registry))
    report = ReportSummary.load(workspace.artifacts.load_current("eagle3_report", "small").path / "heldout")
    assert report.greedy_answers is True
    assert report.labels is not None
    assert report.labels.agreement == report.label_agreement
    assert report.exactness in (Exactness.EXACT, Exactness.ROUNDING)


def republish(workspace: Workspace, draft: Artifact, **changes) -> None:
    """Publish the same weights under a changed identity."""
    workspace.artifacts.obtain(
        draft.asset,
        draft.target,
        {**draft.identity, **changes},
        lambda out: BuildResult(draft.data_version, draft.summary),
    )
