"""A target whose training answers come from an OpenAI-compatible server; those of eval sets still come from the engine."""

from __future__ import annotations

import dagster as dg
from fake_chat import FakeChat
from json_server import json_server

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.planning.identities import Conversations

KEY = "sk-very-secret-1234"


def test_training_data_is_answered_by_the_endpoint_and_the_key_is_kept_nowhere(
    site, tiny_target: TargetFiles, monkeypatch
):
    monkeypatch.setenv("GATEWAY_KEY", KEY)
    fake = FakeChat(tiny_target)
    with json_server(fake) as url:
        endpoint = f"{{base_urls: ['{url}/v1'], server: sglang, api_key_env: GATEWAY_KEY}}"
        text = site.target_file.read_text().replace("responses: {", f"responses: {{endpoint: {endpoint}, ")
        site.target_file.write_text(text)
        wanted = ["target_model", "dataset", "recipe", "conversations", "responses"]
        result = site.run("prepare", asset_selection=[dg.AssetKey(name) for name in wanted])
    assert result.success
    assert fake.keys == {f"Bearer {KEY}"}
    metadata = result.asset_materializations_for_node("responses")[0].metadata
    assert metadata["samples"].value == len(fake.asked)
    assert metadata["generated_tokens"].value == metadata["supervised_tokens"].value > 0
    assert not [path for path in site.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_eval_sets_are_answered_greedily_by_the_engine_and_think_as_the_training_data_does():
    endpoint = {"base_urls": ["http://a:1/v1"], "server": "vllm"}
    responses = {"endpoint": endpoint, "thinking": False, "temperature": 0.7, "max_new_tokens": 9}
    target = TargetSpec(name="a", model="models/a", dataset="chats", responses=responses)

    class Prepared:
        summary = {"kind": "conversations"}

    chosen = Conversations(Prepared(), "heldout", "chats").choose_settings(target)
    assert (chosen.endpoint, chosen.thinking, chosen.temperature, chosen.max_new_tokens) == (None, False, 0.0, 9)
