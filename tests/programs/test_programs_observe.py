"""The command observe: a table of the servers, JSON for programs, and an exit code that says whether all were read.
The program of rung 6: what it refuses, and that its server ends with it.
The program that generates answers, by an engine or an endpoint.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import answering_sglang
import numpy as np
import psutil
import pytest
from answer_toys import answering_run, conversation, rows_of
from fake_chat import FakeChat
from fake_speculating_sglang import Script, fake_python
from forked_ranks import ForkedRanks
from json_server import json_server
from metrics_server import Pages, serve_pages, sglang_pages, vllm_pages
from observed_site import ObservedSite
from paused_time import PausedTime
from processes import wait_until_ended
from request_logs import make_traffic, write_log
from typer.testing import CliRunner, Result
from waiting import HANG_S, wait_until

from draftworks.config.capture import CaptureSpec, SGLangSpec
from draftworks.config.run_files import RegenerateRun, ServeRun, TargetFiles
from draftworks.config.service import ServingSpec
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.errors import ConfigError, EngineError, StoreError
from draftworks.programs import observe
from draftworks.programs.cli import app
from draftworks.programs.program import ProgramContext
from draftworks.programs.regenerate import regenerate
from draftworks.programs.serve import measure_server


@pytest.fixture
def pages() -> list[Pages]:
    return [Pages(sglang_pages(10, 20, 2)), Pages(vllm_pages(5, 5))]


@pytest.fixture
def site(tmp_path: Path, pages: list[Pages]) -> Iterator[ObservedSite]:
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_pages(each)) for each in pages]
        servers = [
            {"name": n, "url": u, "kind": k, "timeout_s": 30.0} for n, u, k in zip("ab", urls, ("sglang", "vllm"))
        ]
        yield ObservedSite.make(tmp_path, servers)


def call(site: ObservedSite, *words: str) -> Result:
    return CliRunner().invoke(app, ["observe", "small", *words, "--registry", str(site.registry)])


def test_each_reading_adds_to_the_series_and_the_table_shows_what_was_accepted_since(site: ObservedSite, pages: list):
    first = call(site)
    assert first.exit_code == 0, first.output
    assert "what it accepts is known after the next reading" in first.output
    pages[0].pages = sglang_pages(20, 50, 4)
    found = json.loads(call(site, "--json").stdout)["servers"]
    assert [one["server"] for one in found] == ["a", "b"]
    assert (found[0]["now"]["value"], found[0]["now"]["passes"], found[0]["draft"]) == (3.0, 10, "drafts/a")
    assert found[1]["now"]["value"] is None
    table = call(site, "--no-read")
    assert "4.000 (no interval)" in table.output
    assert "rung 6" in table.output
    assert json.loads(call(site, "--json", "--no-read").stdout)["servers"] == [{**one, "remarks": []} for one in found]


def test_every_and_for_read_as_often(site: ObservedSite, pages: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(observe, "time", PausedTime())
    assert call(site, "--every", "0.25", "--for", "0.5").exit_code == 0
    assert len(site.open().recall()[0].readings) == 3


def test_one_dead_server_is_a_warning_and_an_exit_code_and_the_others_are_read(site: ObservedSite, pages: list):
    pages[0].pages = {}
    found = call(site)
    assert found.exit_code == 1
    assert "warning: server a (http://127.0.0.1:" in found.output
    assert [len(one.readings) for one in site.open().recall()] == [0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "5"], "say how often too: --every"),
        (["--every", "0"], "--every: expected seconds"),
        (["--every", "1", "--no-read"], "--no-read asks no server"),
    ],
)
def test_times_that_make_no_sense_are_refused(site: ObservedSite, words: list[str], message: str):
    found = call(site, *words)
    assert found.exit_code == 1
    assert message in found.output


def test_a_target_without_servers_is_told_what_to_add(site: ObservedSite):
    site.change_entry(servers=[])
    found = call(site)
    assert found.exit_code == 1
    assert "has no servers: add a `servers` section" in found.output


def test_logs_of_requests_are_a_second_table_and_stand_alone_without_servers(site: ObservedSite):
    site.change_entry(observation={"requests": {"files": ["logs/*.jsonl"]}})
    empty = call(site, "--no-read")
    assert empty.exit_code == 0, empty.output
    assert "no file matches 'logs/*.jsonl'" in empty.output
    write_log(site.registry / "logs" / "a.jsonl", make_traffic({"chat": (0.5, 0.5), "tutor": (0.6, 0.3)}, each=4))
    both = call(site, "--no-read")
    assert both.exit_code == 0, both.output
    assert "servers of small" in both.output
    assert "fell: source tutor" in both.output
    site.change_entry(servers=[])
    found = json.loads(call(site, "--json").stdout)
    assert (found["servers"], found["requests"]["lines"]) == ([], 72 * 8)
    [eagle3] = found["requests"]["strategies"]
    assert eagle3["fell"][0] == "source tutor"
    assert [one["column"] for one in eagle3["slices"][:2]] == ["", "source"]


COMMAND = (
    "python -m sglang.launch_server --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT_FOLDER "
    "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
)


def serve_run(folder: Path, target: TargetFiles, script: Script, **serving: object) -> ServeRun:
    rows = [TokenRow("a", np.arange(5, 11, dtype=np.int32), np.array([0, 0, 0, 1, 1, 1], dtype=bool))]
    write_tokens(folder / "tokens", rows)
    (folder / "out").mkdir()
    return ServeRun(
        out=folder / "out",
        target=target,
        command=COMMAND,
        draft=folder / "draft",
        tokens=folder / "tokens",
        report=folder / "report",
        draft_tokens=2,
        serving=ServingSpec(**{"prompts": 1, "compute_dtype": "float32", "device": "cpu", **serving}),
        logs=folder / "server",
        sglang=SGLangSpec(python=str(fake_python(folder, script)), start_timeout_s=HANG_S, grace_s=2),
        max_length=64,
    )


def test_a_cpu_serves_in_float32_alone(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script(), compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match="compute_dtype: on a CPU expected float32, found bfloat16"):
        measure_server(run, ProgramContext())


def test_an_environment_without_our_platform_plug_in_is_refused_before_a_server_is_started(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script())
    plain = run.sglang.model_copy(update={"python": sys.executable})
    with pytest.raises(
        ConfigError, match="cannot speculate on a CPU: expected a GPU, or this project's platform plug-in"
    ):
        measure_server(run.model_copy(update={"sglang": plain}), ProgramContext())
    assert not run.logs.exists()


def test_a_server_that_proposes_another_number_of_tokens_is_not_compared(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script(verified=6))
    with pytest.raises(EngineError, match="SGLang proposes 5 tokens per pass, the walk that it is compared with 2"):
        measure_server(run, ProgramContext())
    assert "the fake server serves" in (run.logs / "sglang.log").read_text()


def test_nothing_is_published_without_a_walk_to_compare_with(tiny_target, tmp_path):
    run = serve_run(tmp_path, tiny_target, Script({"5 6 7": ([8, 9, 10], [0, 1])}))
    with pytest.raises(StoreError, match="expected a file of an evaluation report, found none"):
        measure_server(run, ProgramContext())
    assert not any(run.out.iterdir())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_cancelled_or_killed_leaves_no_server(tiny_target, tmp_path, signum):
    run = serve_run(tmp_path, tiny_target, Script(hangs=True))
    file = run.save(tmp_path / "run.yaml")
    program = subprocess.Popen([sys.executable, "-m", "draftworks.programs.serve", str(file)], start_new_session=True)
    try:
        wait_until((tmp_path / "asked").exists, "a request", possible=lambda: program.poll() is None)
        child = psutil.Process(int((tmp_path / "child").read_text()))
        server = child.parent()
        program.send_signal(signum)
        assert program.wait() == (128 + signum if signum == signal.SIGTERM else -signum)
        wait_until_ended(server)
        if signum == signal.SIGTERM:  # who is killed cannot look after a server's children: SGLang's own end with it
            wait_until_ended(child)
    finally:
        program.kill()
        program.wait()
        if (tmp_path / "child").exists():
            subprocess.run(["kill", "-9", (tmp_path / "child").read_text()], check=False, stderr=subprocess.DEVNULL)


SOURCES = [conversation(number) for number in range(3)]


def test_an_endpoint_answers_without_a_target_being_loaded(tiny_target, tmp_path: Path, monkeypatch, capsys):
    """Its weights are nowhere; its tokenizer is what the answers are made of."""
    target = tiny_target.model_copy(update={"model": str(tmp_path / "nowhere")})
    fake = FakeChat(target)
    monkeypatch.setenv("GATEWAY_KEY", "sk-secret")
    with json_server(fake) as url:
        endpoint = {"base_urls": [f"{url}/v1"], "server": "sglang", "api_key_env": "GATEWAY_KEY"}
        run = answering_run(target, tmp_path, SOURCES, responses={"endpoint": endpoint})
        report = regenerate(RegenerateRun.load(run.save(tmp_path / "run.yaml")), ProgramContext())
    assert fake.keys == {"Bearer sk-secret"}
    assert (report["conversations"], report["samples"], report["dropped"]) == (3, 3, 0)
    assert report["generated_tokens"] == sum(row.supervised for row in rows_of(run))
    assert "conversations=0/3 tokens=0 tokens/s=0 eta=?" in capsys.readouterr().out


def test_a_choice_that_the_template_does_not_know_is_refused_before_anything_is_loaded(tiny_target, tmp_path: Path):
    run = answering_run(
        tiny_target, tmp_path, SOURCES, responses={"thinking": True}, capture=CaptureSpec(backend="sglang_server")
    )
    with pytest.raises(ConfigError, match="no switch for thinking"):
        regenerate(run, ProgramContext())


def answer_on_nodes(target: TargetFiles, folder: Path, nodes: int, python: Path) -> RegenerateRun:
    """Run the program on so many nodes, each with an SGLang that answers no more than two requests at a time."""
    folder.mkdir()
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", device="cpu", server={"max_outstanding": 2})
    sglang = SGLangSpec(python=str(python), start_timeout_s=HANG_S, grace_s=1, attempts=5)
    sources = [conversation(number) for number in range(12)]
    run = answering_run(target, folder, sources, capture=capture, sglang=sglang)
    run.out.mkdir()
    (folder / "asked").mkdir()
    environment = {
        answering_sglang.FOLDER: str(folder / "asked"),
        answering_sglang.SERVERS: str(nodes),
    }
    ranks = ForkedRanks.start(
        "draftworks.programs.regenerate", [str(run.save(folder / "run.yaml"))], nodes, folder / "ranks",
        folder / "out.log", environment, nodes=True,
    )  # fmt: skip
    assert ranks.wait() == [0] * nodes, (folder / "out.log").read_text()
    return run


def test_servers_of_two_nodes_answer_as_one_does_and_one_that_dies_is_done_without(tiny_target, tmp_path: Path):
    python = answering_sglang.make_python(tmp_path)
    one = answer_on_nodes(tiny_target, tmp_path / "one", 1, python)
    two = answer_on_nodes(tiny_target, tmp_path / "two", 2, python)
    assert [(row.sample_id, row.input_ids.tolist(), row.loss_mask.tolist()) for row in rows_of(two)] == [
        (row.sample_id, row.input_ids.tolist(), row.loss_mask.tolist()) for row in rows_of(one)
    ]
    assert len(list((tmp_path / "two" / "asked").glob("*.asked"))) >= 2
    assert (tmp_path / "two" / "asked" / "killed").exists()
    for run in (one, two):
        assert sorted(path.name for path in run.out.iterdir()) == ["conversations", "quarantine.jsonl", "tokens"]
    servers = {int(path.stem) for path in tmp_path.glob("*/asked/*.asked")}
    assert not [pid for pid in servers if psutil.pid_exists(pid)]


def test_several_ranks_without_servers_to_share_are_refused_before_anything_is_loaded(tiny_target, tmp_path: Path):
    run = answering_run(tiny_target, tmp_path, SOURCES)
    with pytest.raises(ConfigError, match=r"launcher\.programs\.regenerate: \{nodes: 1, workers: N\}"):
        regenerate(run, ProgramContext(rank=1, world_size=2))
