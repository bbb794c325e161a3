"""The program that generates answers, by an engine or an endpoint."""

from __future__ import annotations

from pathlib import Path

import answering_sglang
import psutil
import pytest
from answer_toys import answering_run, conversation, rows_of
from fake_chat import FakeChat
from forked_ranks import ForkedRanks
from json_server import json_server
from waiting import HANG_S

from draftworks.config.capture import CaptureSpec, SGLangSpec
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.errors import ConfigError
from draftworks.programs.program import ProgramContext
from draftworks.programs.regenerate import regenerate

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
    assert "conversations=0/3 tokens/s=0 eta=?" in capsys.readouterr().out


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
