"""The program that generates answers, by an engine or an endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from answer_toys import answering_run, conversation, rows_of
from fake_chat import FakeChat
from json_server import json_server

from draftworks.config.capture import CaptureSpec
from draftworks.config.run_files import RegenerateRun
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
