"""The serving check: off by default, compared with the walk, and limited by the GPU's pool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from fake_speculating_sglang import Script, fake_python, key

from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.data.tokenized import TokenizedSet
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.server_acceptance import build_server_prompts
from draftworks.evaluation.report.comparison import read_walk
from draftworks.storage.artifacts import ArtifactStore
from draftworks.targets.registry import HELDOUT
from spec_assets.code_location import build_definitions
from spec_assets.definitions import REGISTRY
from spec_assets.serving import judge_agreement

SERVING = "{{loop: {{prompts: 2}}, serving: {{prompts: {prompts}, compute_dtype: float32, device: cpu{more}}}}}"


def ask_for(site: Any, prompts: int, more: str = "") -> None:
    site.evaluate(SERVING.format(prompts=prompts, more=more))


def served_like_the_walk(site: Any, folder: Path) -> Script:
    """A fake server that gives the eval set's answers in the passes of the walk."""
    store = ArtifactStore(site.var)
    tokens = TokenizedSet.open(store.load_current(f"{HELDOUT}_responses", "small").path / TOKENS_FOLDER)
    walk = {one.sample_id: one for one in read_walk(store.load_current("eagle3_report", "small").path / HELDOUT)}
    asked = build_server_prompts(tokens, len(tokens), DecodingLimits(24), max_length=96)
    answers = {key(list(q.prompt)): (list(q.expected), list(walk[q.sample_id].histogram)) for q in asked}
    script = Script(answers)
    (site.registry / "deployment.yaml").write_text(f"sglang: {{python: {fake_python(folder, script)}}}\n")
    return script


def materialized(result: dg.ExecuteInProcessResult, name: str) -> Mapping[str, Any]:
    [found] = [
        event.materialization
        for event in result.get_asset_materialization_events()
        if event.asset_key == dg.AssetKey(name)
    ]
    return {key: value.value for key, value in found.metadata.items()}


def test_nobody_is_served_unless_the_target_asks_for_it(finished):
    made = {event.asset_key.to_user_string() for event in finished.result.get_asset_materialization_events()}
    assert "eagle3_export" in made
    assert "eagle3_serving" not in made
    assert not any(check.check_name == "agrees_with_walk" for check in finished.result.get_asset_check_evaluations())


def test_a_live_server_is_asked_what_the_walk_predicted(finished, tmp_path):
    site = finished.site.copy(tmp_path / "site")
    served_like_the_walk(site, tmp_path)
    ask_for(site, prompts=3)
    result = site.run("serve")
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    found = ArtifactStore(site.var).load_current("eagle3_serving", "small")
    export, report = (ArtifactStore(site.var).load_current(f"eagle3_{kind}", "small") for kind in ("export", "report"))
    assert (found.summary["rung"], found.summary["metric"]) == (6, "eval/rung6_server_acc_len")
    assert found.summary["walk"]["equal"] == found.summary["walk"]["prompts"] == 3
    assert found.summary["same_answers"] == found.summary["answers"] == 3
    server = found.summary["server"]
    assert (server["tokens"], server["passes"]) == (found.summary["tokens"], found.summary["acceptance"]["passes"])
    [check] = result.get_asset_check_evaluations()
    assert (check.check_name, check.passed) == ("agrees_with_walk", True)
    # The server had the very draft that the export describes, proposing what the report's walk proposed.
    started = json.loads((tmp_path / "arguments.json").read_text())
    draft = started[started.index("--speculative-draft-model-path") + 1]
    assert draft == str(export.path / "sglang_eagle3")
    proposed = json.loads((report.path / HELDOUT / "report.json").read_text())["draft_tokens"]
    assert started[started.index("--speculative-num-steps") + 1] == str(proposed)
    shown = materialized(result, "eagle3_serving")
    assert "| live server (6), SGLang " in shown["rungs"]
    assert "the fake server serves" in (site.root / shown["server_log"]).read_text()
    # It is made once: asking again starts no server, and nothing before it was made again.
    (tmp_path / "arguments.json").unlink()
    assert materialized(site.run("serve"), "eagle3_serving")["cache"] == "hit"
    assert not (tmp_path / "arguments.json").exists()
    results = (site.var / "eagle3_report" / "small").iterdir()
    assert {each for each in results if each.is_dir() and not each.name.startswith(".")} == {report.path}


def test_a_format_that_is_not_exported_for_the_server_is_refused_first(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    ask_for(site, prompts=1, more=", format: speculators_eagle3")
    result = site.run("serve")
    failure = result.failure_data_for_node("target_model").user_failure_data.description
    assert "no export for SGLang in speculators_eagle3; did you mean sglang_eagle3?" in failure


def test_a_walk_over_other_answers_than_there_are_now_is_not_compared_with(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    ask_for(site, prompts=1)
    target = yaml.safe_load(site.target_file.read_text())
    target["responses"]["max_new_tokens"] -= 1
    site.target_file.write_text(yaml.safe_dump(target))
    failure = site.run("serve").failure_data_for_node("eagle3_serving").user_failure_data.description
    assert "the report is of other held-out answers or limits" in failure
    assert "Run the job evaluate" in failure


def test_a_machine_without_sglang_says_so(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    ask_for(site, prompts=1)
    result = site.run("serve")
    assert not result.success
    failure = result.failure_data_for_node("eagle3_serving").user_failure_data.description
    assert "(sglang.python of the deployment) cannot be run" in failure
    assert "make sglang-env" in failure


def test_a_server_that_we_do_not_start_cannot_be_given_a_draft(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    ask_for(site, prompts=1, more=', server: {url: "http://127.0.0.1:1", spool: /tmp/nowhere}')
    failure = site.run("serve").failure_data_for_node("recipe").user_failure_data.description
    assert "unknown key evaluation.serving.server.url" in failure


def test_another_acceptance_than_the_walks_is_a_warning():
    interval = {"low": -1.5, "high": -0.9, "confidence": 0.95}
    walk = {"difference": -1.2, "interval": interval, "prompts": 9, "equal": 0, "allowed": 0.1, "agrees": False}
    result = judge_agreement({"walk": walk, "same_answers": 8, "answers": 9})
    assert (result.passed, result.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "-1.200 accepted tokens per pass (-1.500 to -0.900) against the walk, on 9 samples" in result.description


@pytest.fixture(scope="module")
def launching() -> dict[str, dg.AssetsDefinition]:
    """Every asset that launches a program, by name."""
    assets = build_definitions(REGISTRY).resolve_asset_graph().assets_defs
    return {made.op.name: made for made in assets if "launcher" in made.required_resource_keys}


def test_whatever_may_need_a_gpu_waits_for_it_in_one_pool(launching):
    pools = {name: made.op.pool for name, made in launching.items() if not name.endswith("_export")}
    assert set(pools.values()) == {"gpu"}, pools
    kinds = {
        "responses",
        "training_features",
        "heldout_eval_features",
        "eagle3_draft",
        "eagle3_report",
        "eagle3_serving",
    }
    assert kinds <= pools.keys()


def test_the_pool_has_one_place_unless_somebody_says_otherwise():
    settings = (REGISTRY.parent / ".dagster" / "dagster.yaml").read_text()
    assert "granularity: op" in settings
    assert "default_limit: 1" in settings
