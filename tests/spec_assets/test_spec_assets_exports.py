"""A trained draft is exported in the formats of servers with its model card; a damaged export fails the run."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import dagster as dg
import pytest

from draftworks.config.strategies import resolve_strategy
from draftworks.export.conventions import GATE_MEANINGS
from draftworks.storage.artifacts import ArtifactStore
from spec_assets.exports import judge_gate, make_export_checks

FORMATS = ["sglang_eagle3", "speculators_eagle3"]


def materialized(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    [found] = [
        event.materialization
        for event in result.get_asset_materialization_events()
        if event.asset_key == dg.AssetKey(name)
    ]
    return {key: value.value for key, value in found.metadata.items()}


def test_every_run_ends_with_a_folder_for_each_format(finished):
    export = ArtifactStore(finished.site.var).load_current("eagle3_export", "small")
    assert list(export.summary["formats"]) == FORMATS
    for name in FORMATS:
        assert {path.name for path in (export.path / name).iterdir()} == {
            "config.json",
            "model.safetensors",
            "README.md",
        }
    shown = materialized(finished.result, "eagle3_export")
    formats = re.sub(" +", " ", shown["formats"])
    assert all(f"| {name} | bfloat16 |" in formats for name in FORMATS)
    assert f'"model": "{export.path / "speculators_eagle3"}", "method": "eagle3"' in shown["serving"]
    assert f"vllm serve {export.path}" not in shown["serving"]  # vLLM 0.33 refuses it: the target is in a folder
    assert "DRAFT_FOLDER" not in shown["serving"]


def test_all_gates_are_asset_checks_and_stop_the_run(finished):
    found = {
        check.check_name: check
        for check in finished.result.get_asset_check_evaluations()
        if check.asset_key == dg.AssetKey("eagle3_export")
    }
    assert list(found) == list(GATE_MEANINGS)
    assert all(check.passed for check in found.values())
    assert all(name in found["same_logits"].description for name in FORMATS)
    assert found["same_logits"].metadata["sglang_eagle3_largest_difference"].value < 1e-4
    specs = make_export_checks(resolve_strategy("eagle3")).check_specs
    assert {spec.name: spec.blocking for spec in specs} == dict.fromkeys(GATE_MEANINGS, True)


def test_the_card_of_the_report_goes_beside_the_weights(finished):
    store = ArtifactStore(finished.site.var)
    export, report = (store.load_current(f"eagle3_{kind}", "small") for kind in ("export", "report"))
    card = (report.path / "README.md").read_text()
    for name in FORMATS:
        assert (export.path / name / "README.md").read_text().startswith(card.rstrip())


def test_an_export_is_made_once_and_again_for_other_settings(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    first = ArtifactStore(site.var).load_current("eagle3_export", "small")
    again = site.run("train_eagle3")
    assert materialized(again, "eagle3_export")["cache"] == "hit"
    entry = "    export: {formats: [sglang_eagle3], dtype: float32}\n"
    site.target_file.write_text(site.target_file.read_text() + entry)
    other = site.run("train_eagle3")
    assert other.success
    export = ArtifactStore(site.var).load_current("eagle3_export", "small")
    assert {name: one["dtype"] for name, one in export.summary["formats"].items()} == {"sglang_eagle3": "float32"}
    assert export.data_version != first.data_version
    assert materialized(other, "eagle3_draft")["cache"] == "hit"


def test_an_unknown_format_is_refused_before_anything_runs(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    site.target_file.write_text(site.target_file.read_text() + "    export: {formats: [sglang_eagle]}\n")
    result = site.run("train_eagle3")
    assert not result.success
    failed = result.failure_data_for_node("recipe").user_failure_data.description
    assert (
        "small.yaml: strategies: strategy eagle3 has no export format 'sglang_eagle': did you mean sglang_eagle3"
        in failed
    )


def test_an_export_without_a_report_of_its_draft_has_no_card(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    shutil.rmtree(site.var / "eagle3_report")
    with dg.DagsterInstance.ephemeral() as instance:
        job = site.definitions().resolve_implicit_global_asset_job_def()
        selection = [dg.AssetKey("eagle3_export")]
        result = job.execute_in_process(partition_key="small", asset_selection=selection, instance=instance)
    assert result.success
    export = ArtifactStore(site.var).load_current("eagle3_export", "small")
    assert (export.path / "sglang_eagle3" / "README.md").read_text().startswith("# eagle3 draft of small\n")


def one(name: str, passed: bool, **figures: Any) -> dict[str, Any]:
    return {"name": name, "passed": passed, "description": f"{name} looked at", "figures": figures}


@pytest.mark.parametrize("wrong", ["good", "bad"])
def test_one_wrong_format_fails_the_gate_and_is_named(wrong: str):
    made = {name: {"gates": [one("finite", name != wrong, largest=2.0)]} for name in ("good", "bad")}
    result = judge_gate("eagle3_export", "finite", made)
    assert not result.passed
    assert result.severity is dg.AssetCheckSeverity.ERROR
    assert result.description == f"{wrong}: finite looked at"


def test_a_gate_that_was_not_looked_at_is_not_passed():
    made = {"sglang_eagle3": {"gates": [one("readable", False)]}}
    assert not judge_gate("eagle3_export", "same_logits", made).passed
    assert "`readable` failed" in judge_gate("eagle3_export", "same_logits", made).description


@pytest.mark.parametrize("gate", GATE_MEANINGS)
def test_no_gate_is_passed_where_nothing_was_exported(gate: str):
    result = judge_gate("eagle3_export", gate, {})
    assert not result.passed
    assert result.description == "nothing was exported"


def test_the_gates_of_a_damaged_export_fail_the_run(finished, tmp_path):
    """If the record says that one gate failed, the checks fail the run."""
    site = finished.site.copy(tmp_path)
    export = ArtifactStore(site.var).load_current("eagle3_export", "small")
    record = json.loads((export.path / "artifact.json").read_text())
    gates = record["summary"]["formats"]["sglang_eagle3"]["gates"]
    next(gate for gate in gates if gate["name"] == "same_logits")["passed"] = False
    (export.path / "artifact.json").write_text(json.dumps(record))
    result = site.run("train_eagle3")
    failed = [check.check_name for check in result.get_asset_check_evaluations() if not check.passed]
    assert "same_logits" in failed
    assert not result.success
