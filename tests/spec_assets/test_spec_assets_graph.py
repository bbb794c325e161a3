"""The whole graph on a small target: every asset is made once, with metadata and checks."""

from __future__ import annotations

import json
import shutil

import dagster as dg
import pyarrow.parquet as pq
import pytest
import warm_starts
from waiting import meanwhile, wait_until

from draftworks.data.tokenized import TokenizedSet
from draftworks.data.vocab import VocabMapping
from draftworks.export.conventions import GATE_MEANINGS
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.lease import LeasePath

MADE = {
    "conversations",
    "responses",
    "heldout_responses",
    "tokenized_train",
    "vocab_mapping",
    "training_features",
    "heldout_eval_features",
    "eagle3_draft",
    "eagle3_report",
    "eagle3_export",
}
RECIPES = {"recipe", "evaluation_recipe", "eagle3_recipe", "eagle3_export_recipe"}
INPUTS = {"target_model", "dataset", *RECIPES}
OF_ALL_TARGETS = {"leaderboard", "fleet"}
CHECKS = {
    ("tokenized_train", "supervised_share"),
    ("heldout_responses", "supervised_share"),
    ("responses", "answers_finished"),
    ("heldout_responses", "answers_finished"),
    ("training_features", "features_verified"),
    ("heldout_eval_features", "features_verified"),
    ("eagle3_draft", "loss_falls"),
    ("eagle3_report", "beats_baselines"),
    ("eagle3_report", "not_worse"),
    ("eagle3_report", "draft_is_current"),
    *(("eagle3_export", gate) for gate in GATE_MEANINGS),
}


def materialized(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetMaterialization]:
    return {
        event.asset_key.to_user_string(): event.materialization for event in result.get_asset_materialization_events()
    }


def cache_states(result: dg.ExecuteInProcessResult) -> set[str]:
    return {m.metadata["cache"].value for m in materialized(result).values() if "cache" in m.metadata}


def test_one_run_goes_from_conversations_to_a_measured_draft(finished):
    found = materialized(finished.result)
    assert set(found) == MADE | INPUTS | {"leaderboard"}
    assert cache_states(finished.result) == {"built"}
    assert "![acceptance" in found["eagle3_report"].metadata["acceptance"].value
    assert "walk (rung 3)" in found["eagle3_report"].metadata["report"].value
    assert found["heldout_eval_features"].metadata["eval_cache"].value == "produced"
    assert found["eagle3_draft"].metadata["world_size"].value == 2


def test_the_run_ends_with_a_leaderboard_that_has_its_report(finished):
    found = materialized(finished.result)["leaderboard"]
    assert found.partition is None
    assert "walk (rung 3), heldout" in found.metadata["leaderboard"].value
    assert [found.metadata[name].value for name in ("dagster/row_count", "stale", "without_a_report")] == [1, 0, 0]
    table = pq.read_table(finished.site.var / "leaderboard" / "leaderboard.parquet").to_pylist()
    assert [(row["target"], row["strategy"]) for row in table] == [("small", "eagle3")]


def test_the_report_has_a_model_card_of_this_very_draft(finished):
    made = ArtifactStore(finished.site.var)
    card = (made.load_current("eagle3_report", "small").path / "README.md").read_text()
    assert made.load_current("eagle3_draft", "small").data_version in card
    assert card.endswith(materialized(finished.result)["eagle3_report"].metadata["model_card"].value)


def test_every_check_ran(finished):
    checks = {
        (check.asset_key.to_user_string(), check.check_name): check
        for check in finished.result.get_asset_check_evaluations()
    }
    assert set(checks) == CHECKS
    assert all(checks[key].passed for key in CHECKS if key[1] not in ("beats_baselines", "answers_finished"))


def test_data_versions_are_content_and_equal_for_equal_content(finished):
    tags = {name: m.tags["dagster/data_version"] for name, m in materialized(finished.result).items()}
    assert tags["responses"] == tags["tokenized_train"]
    assert len(set(tags.values())) == len(tags) - 1


def test_an_unchanged_run_is_a_series_of_hits(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    again = site.run()
    assert again.success
    assert cache_states(again) == {"hit"}


@pytest.mark.long
def test_five_percent_more_conversations_capture_five_percent_more(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    site.write_chats(63)
    assert site.run("prepare").success
    made = ArtifactStore(site.var)
    for name in ("training_features", "heldout_eval_features"):
        before = ArtifactStore(finished.site.var).load_current(name, "small").summary
        after = made.load_current(name, "small").summary
        grown = after["samples"] - before["samples"]
        assert after["captured_samples"] == (grown or before["captured_samples"])


def test_features_that_were_deleted_are_captured_again(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    shutil.rmtree(site.var / "feature_store")
    assert site.run("prepare").success
    features = ArtifactStore(site.var).load_current("training_features", "small")
    assert features.summary["captured_samples"] > 40


OWN_RECIPE = {
    "eagle3_draft": "eagle3_recipe",
    "eagle3_report": "evaluation_recipe",
    "eagle3_export": "eagle3_export_recipe",
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_an_asset_depends_on_what_it_reads_directly_and_on_nothing_else(finished, name):
    graph = finished.site.definitions().resolve_asset_graph()
    parents = {key.to_user_string() for key in graph.get(dg.AssetKey(name)).parent_keys}
    assert parents == finished.reads[name] | {OWN_RECIPE.get(name, "recipe")}


def test_the_vocabulary_says_what_it_has_of_held_out_labels(finished):
    """Its share of the labels that it was made from is no such cap; here it is counted apart from the asset."""
    artifacts = ArtifactStore(finished.site.var)
    made = artifacts.load_current("vocab_mapping", "small")
    kept = set(VocabMapping.load(made.path / "vocab.safetensors").target_ids.tolist())
    rows = TokenizedSet.open(artifacts.load_current("heldout_responses", "small").path / "tokens")
    labels = [int(token) for row in rows for token in row.input_ids[row.loss_mask]]
    share = sum(token in kept for token in labels) / len(labels)
    assert made.summary["heldout_coverage"] == pytest.approx(share)
    assert share < made.summary["coverage"]
    shown = materialized(finished.result)["vocab_mapping"].metadata["heldout_coverage"].value
    assert shown == pytest.approx(share, abs=1e-4)


def test_everything_in_the_graph_is_described(finished):
    for spec in finished.site.definitions().resolve_all_asset_specs():
        assert spec.description, spec.key
        assert spec.group_name in {
            "inputs",
            "data",
            "features",
            "gates",
            "drafts",
            "reports",
            "exports",
            "serving",
            "fleet",
        }
        assert spec.kinds
        assert spec.owners
        assert spec.code_version
        assert (spec.partitions_def is None) == (spec.key.to_user_string() in OF_ALL_TARGETS)


def test_a_target_without_the_strategy_yields_no_draft_and_stays_green(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    text = site.target_file.read_text()
    (site.registry / "targets" / "other.yaml").write_text(text)
    site.target_file.write_text(text[: text.index("strategies:")] + "strategies: {}\n")
    result = site.run("train_eagle3")
    assert result.success
    assert set(materialized(result)) == INPUTS - {"eagle3_recipe", "eagle3_export_recipe"}


def test_an_override_of_the_run_config_makes_another_draft_that_is_compared_with_the_first(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    measured = [dg.AssetKey(name) for name in (*INPUTS, "eagle3_draft", "eagle3_report")]
    config = {"ops": {"eagle3_draft": {"config": {"options": {"step_decay": 0.5}, "training": {"max_steps": 6}}}}}
    executed = warm_starts.list_executed()
    result = site.run("train_eagle3", run_config=config, asset_selection=measured)
    assert result.success
    assert warm_starts.list_executed() == executed, (
        "tests would pay for imports of programs (tests/toys/warm_starts.py)"
    )
    draft = ArtifactStore(site.var).load_current("eagle3_draft", "small")
    assert draft.identity["options"]["step_decay"] == 0.5
    assert draft.summary["steps"] == 6
    assert json.loads((draft.path / "config.json").read_text())["draft"]["options"]["step_decay"] == 0.5
    [check] = [check for check in result.get_asset_check_evaluations() if check.check_name == "not_worse"]
    shown = {name: value.value for name, value in check.metadata.items()}
    first = ArtifactStore(finished.site.var).load_current("eagle3_draft", "small")
    assert (shown["draft"], shown["draft_before"]) == (draft.data_version, first.data_version)
    assert shown["prompts"] > 5
    assert check.passed == (shown["high"] >= 0)


def test_a_second_run_on_the_same_partition_waits_for_the_first(site, caplog):
    lock = site.var / "conversations" / "small" / ".lock"
    lock.parent.mkdir(parents=True)
    first = LeasePath(lock).try_acquire()
    assert first is not None

    def release_once_it_waits() -> None:
        wait_until(lambda: "is being materialized by another run" in caplog.text, "that the second run waits")
        first.release()

    with caplog.at_level("INFO"), meanwhile(release_once_it_waits):
        result = site.run("prepare", asset_selection=[dg.AssetKey("conversations")])
    assert result.success
    assert "conversations of target small is being materialized by another run" in caplog.text
