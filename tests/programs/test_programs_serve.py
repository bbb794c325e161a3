"""The serving check in vLLM: what is no measurement of this draft is one clear line, and nothing is counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import fake_speculating_sglang
import numpy as np
import pytest
import torch
from fake_speculating_vllm import Handler, Script, fake_vllm_python
from waiting import HANG_S

from draftworks.config.capture import SGLangSpec, VLLMSpec
from draftworks.config.run_files import ServeRun, TargetFiles
from draftworks.config.service import ServingSpec
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.errors import ConfigError, DraftworksError, EngineError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.report.served import list_served
from draftworks.programs import draft_servers, serve
from draftworks.programs.program import ProgramContext
from draftworks.programs.serve import measure_server
from draftworks.vllm.speculation import parse_speculation

CONFIG = {"model": "DRAFT_FOLDER", "method": "eagle3", "num_speculative_tokens": 5}
COMMAND = f"vllm serve models/toy --speculative-config '{json.dumps(CONFIG)}'"
SGLANG_COMMAND = (
    "python -m sglang.launch_server --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT_FOLDER "
    "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
)
NAMES = "abcd"
ANSWERS = {f"5 6 {number}": ([8, 9, 10], [1]) for number in range(len(NAMES))}
"""The first token is of the prefill; a pass accepts one token, and adds the target's own."""


@pytest.fixture
def run(tiny_target: TargetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeRun:
    """A run over four samples, whose walk is what the answers of `ANSWERS` count."""
    rows = [
        TokenRow(name, np.array([5, 6, number, 8, 9, 10], dtype=np.int32), np.array([0, 0, 0, 1, 1, 1], dtype=bool))
        for number, name in enumerate(NAMES)
    ]
    write_tokens(tmp_path / "tokens", rows)
    walk = tuple(PromptAcceptance(name, 1, 1, 2, (0, 1)) for name in NAMES)
    monkeypatch.setattr(serve, "read_walk", lambda folder: walk)
    monkeypatch.setattr(serve, "read_loop", lambda folder, decoding: walk if decoding.temperature == 0.6 else ())
    for folder in ("out", "draft"):
        (tmp_path / folder).mkdir()
    return ServeRun(
        engine="vllm",
        out=tmp_path / "out",
        target=tiny_target,
        command=COMMAND,
        draft=tmp_path / "draft",
        tokens=tmp_path / "tokens",
        report=tmp_path / "report",
        draft_tokens=2,
        serving=ServingSpec(engines=["vllm"], prompts=4, compute_dtype="float32", device="cpu"),
        logs=tmp_path / "server",
        max_length=64,
    )


def start_ours(run: ServeRun, script: Script, **changes: object) -> ServeRun:
    """The run with a server of ours, which does what the script says."""
    python = fake_vllm_python(run.out.parent, script)
    spec = VLLMSpec(python=str(python), start_timeout_s=HANG_S, grace_s=2)
    return run.model_copy(update={"vllm": spec, **changes})


@contextmanager
def running(script: Script, model: str) -> Iterator[str]:
    """A server that somebody else has started."""
    handler = type("Running", (Handler,), {"script": script, "root": model, "name": "theirs"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_vllm_of_ours_is_asked_what_the_walk_predicted_and_then_sampled(run: ServeRun, monkeypatch):
    monkeypatch.setattr(
        draft_servers, "resolve_device", lambda device: torch.device("cuda")
    )  # on a CPU it is not sampled
    report = measure_server(
        start_ours(run, Script(ANSWERS), decodings=["t0.6_greedy_draft", "t1_greedy_draft"]), ProgramContext()
    )
    assert (report["engine"], report["walk"]["equal"], report["same_answers"]) == ("vllm", 4, 4)
    assert report["server"] == {"version": "0.32.0", "passes": 4, "tokens": 12, "avg_spec_accept_length": None}
    sampled, other = report["sampled"]
    assert (sampled["metric"], sampled["loop"]["difference"]) == ("eval/rung6_server_acc_len_t0.6_greedy_draft", 0.0)
    assert other["loop"] is None  # the report has no rung 4 of it
    told = json.loads((run.out.parent / "vllm_arguments.json").read_text())
    config = json.loads(told[told.index("--speculative-config") + 1])
    assert config == {"model": str(run.draft), "method": "eagle3", "num_speculative_tokens": 2}
    assert json.loads((run.out / "serving.json").read_text())["prompts"] == {name: [0, 1] for name in NAMES}


def test_servers_are_measured_one_after_another_and_stand_side_by_side(run: ServeRun):
    with running(Script(ANSWERS, draft=str(run.draft)), "/elsewhere/model") as url:
        other = run.model_copy(update={"url": url}).as_serving()
        report = measure_server(start_ours(run, Script(ANSWERS), others=[other]), ProgramContext())
    first, second = list_served(report)
    assert ("url" in first, second["url"], second["draft_compared"]) == (False, url, True)
    assert first["acceptance"] == second["acceptance"]
    assert "others" not in second


@pytest.mark.parametrize(("device", "times"), [("cuda", 2), ("cpu", 1)])
def test_sglang_is_not_sampled_where_it_verifies_greedily_at_every_temperature(run: ServeRun, device: str, times: int):
    """On a CPU 0.5.23 would report greedy acceptance as that of its sampling."""
    script = fake_speculating_sglang.Script(
        {prompt: (ids, [0, 1]) for prompt, (ids, _) in ANSWERS.items()}, device=device
    )
    python = fake_speculating_sglang.fake_python(run.out.parent, script)
    spec = SGLangSpec(python=str(python), start_timeout_s=HANG_S, grace_s=2)
    changes = {"engine": "sglang", "command": SGLANG_COMMAND, "sglang": spec, "decodings": ["t0.6_greedy_draft"]}
    report = measure_server(run.model_copy(update=changes), ProgramContext())
    assert 1 + len(report["sampled"]) == times
    assert report["walk"]["equal"] == 4


def assert_refused(run: ServeRun, error: type[DraftworksError], words: str) -> None:
    with pytest.raises(error, match=words) as found:
        measure_server(run, ProgramContext())
    assert "Traceback" not in str(found.value)
    assert not any(run.out.iterdir())


def test_a_draft_of_another_target_is_refused_before_a_server_starts(run: ServeRun):
    (run.draft / "config.json").write_text(json.dumps({"provenance": {"target_digest": "other"}}))
    assert_refused(start_ours(run, Script(ANSWERS)), ConfigError, "a draft of the target with digest other, expected")
    assert not run.logs.exists()


def test_a_draft_that_vllm_serves_on_gpus_alone_is_refused_before_a_server_starts(run: ServeRun):
    (run.draft / "config.json").write_text(json.dumps({"architectures": ["DFlash2DraftModel"]}))
    assert_refused(
        start_ours(run, Script(ANSWERS)),
        ConfigError,
        "serves drafts of the class DFlash2DraftModel by its Model Runner V2",
    )
    assert not run.logs.exists()


def test_a_server_that_ends_in_the_middle_is_told_with_the_end_of_its_log(run: ServeRun):
    ended = start_ours(run, Script(ANSWERS, ends_after=2))
    assert_refused(ended, EngineError, r"(?s)vLLM ended with code 7 while it answered.*out of memory")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(ANSWERS, counts=False), "found none of its counters: .*without --disable-log-stats"),
        (Script(ANSWERS, counts_requests=False), "expected a server with --speculative-config"),
        (Script(ANSWERS, proposed=5), "vLLM proposes 5 tokens per pass, the walk that it is compared with 2"),
    ],
    ids=["no metrics", "no draft", "another number of tokens"],
)
def test_a_running_server_that_does_not_count_this_draft_is_refused(run: ServeRun, script: Script, words: str):
    with running(script, "models/toy") as url:
        assert_refused(run.model_copy(update={"url": url}), EngineError, words)


def test_a_running_server_with_another_draft_or_of_another_target_is_refused(run: ServeRun, tmp_path: Path):
    (run.draft / "config.json").write_text("{}")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"another": 1}')
    with running(Script(ANSWERS, draft=str(tmp_path / "theirs")), "models/toy") as url:
        assert_refused(run.model_copy(update={"url": url}), ConfigError, "whose config.json is not that of")
    foreign = {prompt: ([1, 2, 3], [1]) for prompt in ANSWERS}
    with running(Script(foreign), "models/toy") as url:
        assert_refused(
            run.model_copy(update={"url": url}), EngineError, "none of 4 greedy answers begins with the token"
        )


def test_a_command_without_a_speculative_config_is_refused():
    with pytest.raises(ConfigError, match="expected --speculative-config with a model"):
        parse_speculation("vllm serve DRAFT_FOLDER", "DRAFT_FOLDER", Path("draft"), 5)
