"""Real vLLM speculates with our exports on a CPU as the walk said, count for count; above temperature 0 it is not asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from request_logs import write_rows
from waiting import HANG_S

from draftworks.config.observation import ObservationSpec, RequestsSpec
from draftworks.config.run_files import ServeRun
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import read_conversations
from draftworks.data.tokenized import TokenizedSet
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.server_acceptance import build_server_prompts
from draftworks.production.promised import Promise
from draftworks.production.request_log import RequestLog, ServedBy
from draftworks.production.served_slices import assess_requests
from draftworks.programs.draft_servers import open_draft_server
from draftworks.programs.program import ProgramContext
from draftworks.programs.serve import RESULT
from draftworks.storage.artifacts import Artifact, ArtifactStore

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
PROMPTS = 4
EVALUATION = (
    f"{{loop: {{prompts: {PROMPTS}, temperatures: [0, 0.6]}}, serving: {{engines: [vllm], temperatures: [0.6], "
    f"prompts: {PROMPTS}, concurrency: {PROMPTS}, compute_dtype: float32, device: cpu}}}}"
)


@pytest.fixture(scope="module")
def site(shared_site, tmp_path_factory: pytest.TempPathFactory):
    """A draft that learned fast, exported in the dtype of training, with its serving check."""
    site = shared_site.copy(tmp_path_factory.mktemp("eagle3"))
    text = site.target_file.read_text().replace("epochs: 3, lr: 0.002", "epochs: 10, lr: 0.01")
    site.target_file.write_text(text.rstrip() + "\n    export: {dtype: float32}\n")
    site.evaluate(EVALUATION)
    vllm = f"{{python: {PYTHON}, start_timeout_s: {HANG_S}, grace_s: 10}}"
    (site.registry / "deployment.yaml").write_text(f"vllm: {vllm}\n")
    result = site.run()
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    checks = {check.asset_key.to_user_string(): check for check in result.get_asset_check_evaluations()}
    assert checks["eagle3_serving"].passed
    return site


@pytest.fixture(scope="module")
def served(site) -> Artifact:
    return ArtifactStore(site.var).load_current("eagle3_serving", "small")


def test_a_live_vllm_accepts_what_the_walk_said(served: Artifact):
    found = served.summary
    assert (found["engine"], found["algorithm"]) == ("vllm", "eagle3")
    assert found["same_answers"] == found["answers"] == PROMPTS
    assert found["walk"]["equal"] == found["walk"]["prompts"] == PROMPTS
    assert found["acceptance"]["accepted"] > 0  # an equal count of nothing would say little
    # The server's own counters are of these requests and no others.
    measured = json.loads((served.path / RESULT).read_text())
    assert found["server"]["tokens"] == found["tokens"]
    assert found["server"]["passes"] == sum(map(sum, measured["prompts"].values()))


def test_nothing_is_sampled_where_the_server_loses_the_temperature(served: Artifact):
    """0.32.0 on a CPU: see tests/production/test_production_vllm.py."""
    assert served.summary["sampled"] == []


def ask(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a gateway's log: a request with its answer."""
    request = Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=HANG_S) as answer:
        return {"request": dict(body), "response": json.loads(answer.read()), "server": "front"}


@pytest.mark.long
def test_requests_to_a_live_vllm_are_what_the_report_promised_prompt_by_prompt(site, tmp_path: Path):
    """From the lines of a log alone, of completions of tokens and of chats."""
    artifacts = ArtifactStore(site.var)
    [report] = artifacts.list_all("eagle3_report", "small")
    promise = Promise.read(artifacts, report, "heldout")
    run = load_serve_run(site.var)
    limits = DecodingLimits(run.max_new_tokens, ChatTokenizer.load(run.target).eos_ids)
    asked = build_server_prompts(TokenizedSet.open(run.tokens), 8, limits, run.max_length)
    turns = {one.id: one.turns for one in read_conversations(run.tokens.parent / "conversations")}
    with open_draft_server(run.model_copy(update={"logs": tmp_path / "server"}), ProgramContext()) as server:
        client = server._client
        plain = {"model": client.list_models()[0].name, "temperature": 0.0, "repetition_penalty": 1.0}
        by_tokens = [
            ask(client.url, "/v1/completions", {
                **plain, "prompt": list(one.prompt), "max_tokens": one.max_new_tokens, "stop_token_ids": limits.stop_ids,
            })
            for one in asked
        ]  # fmt: skip
        chats = [
            ask(client.url, "/v1/chat/completions", {
                **plain, "max_tokens": one.max_new_tokens,
                "messages": [{"role": turn.role, "content": turn.content} for turn in turns[one.sample_id][:-1]],
            })
            for one in asked
        ]  # fmt: skip
    for name, rows in (("tokens", by_tokens), ("chats", chats)):
        write_rows(tmp_path / f"{name}.jsonl", rows)
        log = RequestLog(
            RequestsSpec(files=[f"{name}.jsonl"]), tmp_path, (plain["model"],), lambda _: ServedBy("eagle3", "d")
        )
        reading = log.read()
        assert reading.apart == {}
        found = assess_requests("eagle3", reading.requests["eagle3"], ObservationSpec(), promise).prompts
        assert found is not None
        assert (found.requests, found.prompts, found.equal) == (len(asked), len(asked), len(asked)), (name, found)


def load_serve_run(var: Path) -> ServeRun:
    """The run file of the serving check."""
    for path in sorted(var.rglob("*.yaml")):
        found = yaml.safe_load(path.read_text())
        if isinstance(found, dict) and {"serving", "draft_tokens", "command"} <= found.keys():
            return ServeRun.load(path)
    raise AssertionError("no run file of a serving check")
