"""Bad input ends the step concerned with one clear message, and the store stays as it was."""

from __future__ import annotations

import json
import shutil

import dagster as dg
import pytest
from safetensors.torch import load_file, save_file

ANSWERING = [dg.AssetKey(name) for name in ("target_model", "dataset", "recipe", "conversations", "responses")]


def edited(site, old: str, new: str) -> None:
    text = site.target_file.read_text()
    assert old in text
    site.target_file.write_text(text.replace(old, new))


def failure(result, step: str) -> str:
    assert not result.success
    failed = [event.step_key for event in result.all_events if event.is_step_failure]
    assert step in failed
    return result.failure_data_for_node(step).user_failure_data.description


def stored(site) -> list[str]:
    return sorted(str(p.relative_to(site.var)) for p in site.var.rglob("*.safetensors"))


def test_a_missing_target_directory(site):
    edited(site, "model: ", "model: /nowhere")
    assert "is not a directory" in failure(site.run("resolve"), "target_model")


def test_an_unreadable_target(site, tiny_folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    edited(site, f"model: {tiny_folder}", f"model: {copy}")
    message = failure(site.run("prepare", asset_selection=ANSWERING), "target_model")
    assert "not a readable safetensors file" in message
    assert str(copy) in message
    assert stored(site) == []


@pytest.mark.parametrize("backend", ["hf", "sglang_server"])
def test_weights_that_do_not_belong_to_the_target_are_told_first_whatever_captures(
    site, tiny_folder, tmp_path, backend
):
    copy = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    edited(site, f"model: {tiny_folder}", f"model: {copy}")
    edited(site, "capture: {", f"capture: {{backend: {backend}, ")
    result = site.run("resolve")
    assert "18 tensors are unexpected: model.layers.6." in failure(result, "target_model")


def test_a_tokenizer_without_a_chat_template(site, tiny_folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    (copy / "chat_template.jinja").unlink()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    edited(site, f"model: {tiny_folder}", f"model: {copy}")
    assert "chat template" in failure(site.run("prepare", asset_selection=ANSWERING), "target_model")
    assert not (site.var / "answers").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no row"),
        ('{"messages": [{"role": "system", "content": "hi"}]}\n' * 3, "no assistant turn"),
        ("not json\n", "chats.jsonl"),
    ],
)
def test_data_that_gives_no_conversation_is_found_before_any_work(site, content, message):
    site.chats.write_text(content)
    assert message in failure(site.run("prepare"), "target_model")
    assert not (site.var / "conversations").exists()


def test_rows_behind_the_sample_that_are_rejected_stop_where_they_are_read(site):
    site.chats.write_text(site.chats.read_text() + '{"messages": []}\n' * 10_000)
    assert "max_rejected_share" in failure(site.run("prepare"), "conversations")


def test_a_data_set_without_files(site):
    site.chats.unlink()
    assert "matches no file" in failure(site.run("resolve"), "dataset")


def test_an_unknown_strategy(site):
    edited(site, "  eagle3:", "  eagle33:")
    assert "did you mean eagle3 " in failure(site.run("resolve"), "recipe")


@pytest.mark.parametrize(
    ("options", "message"),
    [("ttt_length: 2, layer_ids: [2, 2, 5]", "taps collide"), ("ttt_length: 2, layer_ids: [2, 4, 99]", "outside 0..7")],
)
def test_layer_ids_that_the_target_does_not_have_are_found_before_any_work(site, options, message):
    edited(site, "ttt_length: 2", options)
    assert message in failure(site.run("prepare"), "target_model")
    assert not (site.var / "answers").exists()


def test_a_draft_vocabulary_larger_than_the_targets_is_found_before_any_work(site):
    edited(site, "draft_vocab_size: 256", "draft_vocab_size: 32000")
    assert "larger than the model's vocabulary of 2048" in failure(site.run("prepare"), "target_model")


def test_a_value_that_nobody_can_mean_is_found_before_any_work(site):
    edited(site, "lr: 0.002", "lr: 100")
    assert "training.lr: found 100" in failure(site.run("prepare"), "target_model")
    assert not (site.var / "answers").exists()


def test_samples_longer_than_the_context_of_the_target(site):
    edited(site, "max_length: 96", "max_length: 4096")
    assert "max_length 4096 is longer than the model's context of 512" in failure(site.run("resolve"), "target_model")


def test_a_budget_that_is_exceeded_stops_before_anything_is_stored(finished_site, tmp_path):
    copy = finished_site.copy(tmp_path)
    shutil.rmtree(copy.var / "feature_store")
    edited(copy, "budget_gb: 1", "budget_gb: 0.0001")
    features = dg.AssetKey("training_features")
    message = failure(copy.run("prepare", asset_selection=[features]), "training_features")
    assert "more than capture.budget_gb = 0.0001" in message
    assert list((copy.var / "feature_store").rglob("*.safetensors")) == []


def damaged(site, change) -> None:
    shard = max((site.var / "feature_store").glob("*/shards/*.safetensors"), key=lambda p: p.stat().st_size)
    content = bytearray(shard.read_bytes())
    shard.write_bytes(change(content))


def flipped(content: bytearray) -> bytes:
    for position in range(len(content) // 2, len(content)):
        content[position] ^= 0xFF
    return bytes(content)


@pytest.mark.parametrize("change", [lambda content: bytes(content[:-100]), flipped], ids=["truncated", "altered"])
def test_a_damaged_shard_stops_training_and_is_named(finished_site, tmp_path, change):
    copy = finished_site.copy(tmp_path)
    damaged(copy, change)
    config = {"ops": {"eagle3_draft": {"config": {"start_over": True}}}}
    message = failure(copy.run("train_eagle3", run_config=config), "eagle3_draft")
    assert ".safetensors" in message


def test_a_lost_result_of_an_earlier_step_says_what_to_materialize(finished_site, tmp_path):
    copy = finished_site.copy(tmp_path)
    shutil.rmtree(copy.var / "training_features")
    assert "materialize it first" in failure(copy.run("train_eagle3"), "eagle3_draft")


def test_features_of_weights_that_were_replaced_train_no_draft(finished_site, tiny_folder, tmp_path):
    copy, model = finished_site.copy(tmp_path), shutil.copytree(tiny_folder, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    edited(copy, f"model: {tiny_folder}", f"model: {model}")
    message = failure(copy.run("train_eagle3"), "eagle3_draft")
    assert "training_features of target small was captured from other weights" in message
    assert "draftworks run prepare --target small" in message


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"options": {"ttt_lenght": 7}}, "ttt_length"),
        ({"training": {"learning_rate": 1.0}}, "unknown key learning_rate"),
        ({"training": {"lr": 5}}, "training.lr: found 5"),
        ({"options": {"layer_ids": [2, 4, 99]}}, "target small: eagle3: configured layer ids [2, 4, 99]"),
    ],
)
def test_a_wrong_override_of_a_run_is_found_before_any_work(site, config, hint):
    found = site.run("everything", run_config={"ops": {"eagle3_draft": {"config": config}}})
    assert hint in failure(found, "recipe")
    assert not (site.var / "answers").exists()
