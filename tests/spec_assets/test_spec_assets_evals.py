"""Named eval sets beside `heldout`, and their features in the evaluation cache."""

from __future__ import annotations

import json
import re
import shutil

import dagster as dg
import pyarrow.parquet as pq
import pytest

from draftworks.config.data import AnswersSampling
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import ReportSummary
from draftworks.features.manifest import read_feature_set
from draftworks.storage.artifacts import ArtifactStore
from draftworks.targets.registry import Registry


def with_extra_set(site, conversations: int = 8):
    """A second eval set, `extra`, of conversations that are not in the first; the target lists it."""
    rows = pq.read_table(site.tiny_folder / "corpus.parquet").slice(2000, conversations).to_pylist()
    chats = [{"messages": row["messages"][:2], "task": row["task"]} for row in rows]
    (site.registry / "others.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (site.registry / "datasets" / "others.yaml").write_text("files: [others.jsonl]\n")
    (site.registry / "evals").mkdir(exist_ok=True)
    (site.registry / "evals" / "extra.yaml").write_text("dataset: others\n")
    site.target_file.write_text(site.target_file.read_text() + "evals: [extra]\n")
    return site


def shown(result: dg.ExecuteInProcessResult, asset: str) -> dict:
    events = result.get_asset_materialization_events()
    return next(e.materialization.metadata for e in events if e.asset_key.to_user_string() == asset)


@pytest.mark.slow
def test_a_named_eval_set_goes_from_its_file_to_the_report(finished_site, tmp_path):
    site = with_extra_set(finished_site.copy(tmp_path))
    result = site.run("everything")
    assert result.success
    report = ArtifactStore(site.var).load_current("eagle3_report", "small")
    assert set(report.summary["evals"]) == {"heldout", "extra"}
    metadata = shown(result, "eagle3_report")
    assert "extra" in metadata["report_extra"].value
    judged = {(check.asset_key.to_user_string(), check.check_name) for check in result.get_asset_check_evaluations()}
    assert {("heldout_responses", "answers_finished"), ("extra_responses", "answers_finished")} <= judged
    assert all(
        score.value is not None for score in ReportSummary.load(report.path / "extra").select_scores("trained", 3)
    )
    extra = Report.load(report.path / "extra")
    assert len(extra.drafts["trained"].walk) == 8
    assert extra.answers == AnswersSampling()  # the target's, greedily
    draft = shown(result, "eagle3_draft")
    assert draft["cache"].value == "hit"  # other eval sets do not make another draft

    again = site.run("everything")
    assert shown(again, "eagle3_report")["cache"].value == "hit"
    assert shown(again, "extra_eval_features")["eval_cache"].value == "hit"


@pytest.mark.parametrize("gate", ["warn", "error"])
def test_answers_of_an_eval_set_that_are_mostly_cut_are_told(finished_site, tmp_path, gate):
    """Benchmarks ask for long answers: what is measured on is then their beginnings."""
    site = with_extra_set(finished_site.copy(tmp_path))
    text = site.target_file.read_text() + f"gates: {{answers_finished: {gate}}}\n"
    site.target_file.write_text(re.sub(r"max_new_tokens: \d+", "max_new_tokens: 4", text))
    of_set = [dg.AssetKey(f"extra_{part}") for part in ("set", "responses", "eval_features")]
    result = site.run("prepare", asset_selection=of_set)
    judged = {check.asset_key.to_user_string(): check for check in result.get_asset_check_evaluations()}
    found = judged["extra_responses"]
    assert not found.passed
    assert "of 8 answers were cut off by responses.max_new_tokens (4)" in found.description
    made = {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}
    assert ("extra_eval_features" in made) == (gate == "warn")


def test_an_eval_set_that_a_target_does_not_list_yields_nothing_for_it(finished_site, tmp_path):
    site = with_extra_set(finished_site.copy(tmp_path))
    site.target_file.write_text(site.target_file.read_text().replace("evals: [extra]\n", ""))
    result = site.run("prepare")
    assert result.success
    made = {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}
    assert not any(name.startswith("extra") for name in made)
    assert "heldout_eval_features" in made


def test_an_eval_set_named_as_the_built_in_one_stops_only_who_lists_it(site):
    with_extra_set(site)
    (site.registry / "evals" / "extra.yaml").rename(site.registry / "evals" / "heldout.yaml")
    text = site.target_file.read_text()
    (site.registry / "targets" / "other.yaml").write_text(text.replace("evals: [extra]\n", ""))
    site.target_file.write_text(text.replace("[extra]", "[heldout]"))
    assert site.run("resolve", partition="other").success
    failure = site.run("resolve").failure_data_for_node("recipe")
    assert "heldout is the built-in eval set: give yours another name" in failure.user_failure_data.description
    assert any("built-in eval set" in line for line in Registry(site.registry).find_problems())


def test_an_unknown_eval_set_is_found_before_any_work(site):
    site.target_file.write_text(site.target_file.read_text() + "evals: [exta]\n")
    result = site.run("prepare")
    failure = result.failure_data_for_node("recipe")
    assert "evals/exta.yaml: no such file" in failure.user_failure_data.description


def features_of(site) -> dg.ExecuteInProcessResult:
    result = site.run("evaluate", asset_selection=[dg.AssetKey("heldout_eval_features")])
    assert result.success
    return result


def test_cached_eval_features_are_a_hit_with_their_key_and_place(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    first, again = (shown(features_of(site), "heldout_eval_features") for _ in range(2))
    for name in ("eval_cache_key", "eval_cache_path"):
        assert first[name].value == again[name].value
    assert again["eval_cache"].value == "hit"
    assert again["eval_cache_path"].value.endswith(f"eval_cache/{again['eval_cache_key'].value}")


@pytest.mark.slow
def test_inputs_that_change_and_change_back_find_no_entry_of_the_others(finished_site, tmp_path):
    """Two contents under one cache key: the first result still exists after the entry was replaced by the second."""
    site = finished_site.copy(tmp_path)
    before, text = shown(features_of(site), "heldout_eval_features"), site.target_file.read_text()
    entry = site.var / "eval_cache" / before["eval_cache_key"].value
    original = read_feature_set(entry).data_version
    site.target_file.write_text(text.replace("capture: {dtype: float32", "capture: {dtype: bfloat16"))
    features_of(site)
    assert read_feature_set(entry).data_version != original
    site.target_file.write_text(text)
    after = shown(features_of(site), "heldout_eval_features")
    assert "capture changed from" in after["rebuilt_because"].value
    assert read_feature_set(entry).data_version == original


@pytest.mark.long
def test_an_entry_that_is_lost_altered_or_without_its_features_is_made_again(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    before = shown(features_of(site), "heldout_eval_features")
    entry = site.var / "eval_cache" / before["eval_cache_key"].value
    assert entry.is_dir()
    for damage in (
        lambda: shutil.rmtree(entry),
        lambda: (entry / "refs.jsonl").write_text(""),
        lambda: shutil.rmtree(site.var / "feature_store"),
    ):
        damage()
        after = shown(features_of(site), "heldout_eval_features")
        assert after["eval_cache"].value == "produced"
        assert after["eval_cache_key"].value == before["eval_cache_key"].value
        assert shown(features_of(site), "heldout_eval_features")["eval_cache"].value == "hit"
