"""`draftworks engine` serves a target at the URL of its entry, and refuses what it cannot do before it starts anything."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from ports import reserve_port
from processes import ending, wait_until_ended
from sglang_toys import SGLANG
from typer.testing import CliRunner
from waiting import HANG_S

from draftworks.capture.engines.sglang_hosts import require_server
from draftworks.programs.cli import app
from draftworks.sglang.client import SGLangClient
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target

LAYERS = (1, 4, 6)
"""Whose outputs are hf2, hf5 and hf7."""


@pytest.fixture
def registry(tmp_path: Path, tiny_folder: Path) -> Path:
    root = tmp_path / "registry"
    (root / "targets").mkdir(parents=True)
    (root / "datasets").mkdir()
    (root / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    (root / "deployment.yaml").write_text(yaml.safe_dump({"sglang": {"python": SGLANG.python}}))
    write_target(root, tiny_folder, {"url": f"http://127.0.0.1:{reserve_port()}", "spool": str(tmp_path / "spool")})
    return root


def write_target(root: Path, model: Path, server: dict | None, backend: str = "sglang_server") -> None:
    capture = {
        "backend": backend,
        "device": "cpu",
        "compute_dtype": "float32",
        **({"server": server} if server else {}),
    }
    options = {"layer_ids": [layer + 1 for layer in LAYERS], "draft_vocab_size": 64}
    entry = {
        "model": str(model), "dataset": "chats", "max_length": 96, "responses": {"max_new_tokens": 24},
        "capture": capture, "strategies": {"eagle3": {"options": options}},
    }  # fmt: skip
    (root / "targets" / "small.yaml").write_text(yaml.safe_dump(entry))


def refusal(root: Path) -> str:
    asked = CliRunner().invoke(app, ["engine", "small", "--registry", str(root)])
    assert asked.exit_code == 1
    assert len(asked.stderr.splitlines()) == 1
    return asked.stderr


@pytest.mark.parametrize("server", [None, {"url": "http://elsewhere:30000", "spool": "/tmp/s"}])
def test_an_entry_that_names_no_server_of_this_machine_is_refused(registry: Path, tiny_folder: Path, server):
    write_target(registry, tiny_folder, server)
    expected = "url: expected http://127.0.0.1:PORT, found http://elsewhere:30000" if server else "such as capture:"
    assert expected in refusal(registry)


def test_an_entry_of_another_backend_is_refused(registry: Path, tiny_folder: Path):
    write_target(registry, tiny_folder, None, backend="hf")
    assert "expected backend sglang_server, url and spool" in refusal(registry)


def test_a_taken_port_is_refused(registry: Path, tiny_folder: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        write_target(registry, tiny_folder, {"url": url, "spool": str(tmp_path / "spool")})
        assert "expected a free port" in refusal(registry)


@pytest.mark.sglang
@pytest.mark.timeout(1800)
def test_captures_and_answers_find_in_it_what_their_entry_asks_for(registry: Path):
    words = ["-m", "draftworks.programs.cli", "engine", "small", "--registry", str(registry)]
    with ending(subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)) as serving:
        lines = []
        while not any("serves at" in line for line in lines):
            lines.append(serving.stdout.readline())
            assert lines[-1], lines
        found = Registry(registry)
        target = found.load_target("small")
        files, client = resolve_target(target, found, FileDigests()), SGLangClient(target.capture.server.url, HANG_S)
        info = require_server(client, files, target.capture, LAYERS, longest=target.max_length)
        assert set(LAYERS) <= set(info.layer_ids)
        processes = [psutil.Process(serving.pid), *psutil.Process(serving.pid).children(recursive=True)]
        assert len(processes) > 1
        serving.send_signal(signal.SIGINT)
        wait_until_ended(*processes)
        assert serving.wait() == 0
