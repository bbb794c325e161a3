"""The calls by which a running vLLM exchanges its draft, and what stops them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from json_server import QuietHandler, serve

from draftworks.errors import ConfigError, EngineError
from draftworks.vllm.exchange import PLUGIN, exchange_draft


@dataclass
class StandIn:
    """A vLLM that notes every call; `refuses` is the path that it answers with `status`."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    refuses: str = ""
    status: int = 500
    version: str = "default"
    url: str = ""


@pytest.fixture
def vllm() -> Iterator[StandIn]:
    server = StandIn()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps({"weight_version": server.version}).encode())

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(content) if content else None
            server.calls.append((self.path, body))
            if self.path == server.refuses:
                self.reply(server.status, b"other fc.weight than at the start: restart the server")
                return
            if self.path == "/finish_weight_update":
                server.version = body["weight_version"]
            self.reply(200, b"{}")

    with serve(Handler) as server.url:
        yield server


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make_draft(tmp_path / "new", b"new")


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return make_draft(tmp_path / "served", b"old")


def make_draft(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_the_draft_is_copied_and_named_by_its_digest_between_pause_and_resume(vllm: StandIn, new: Path, served: Path):
    exchange_draft(vllm.url, new, served, "v2", 10)
    assert (served / "model.safetensors").read_bytes() == b"new"
    assert vllm.calls == [
        ("/pause?mode=wait", None),
        ("/start_draft_weight_update", None),
        ("/update_weights", {"update_info": {"sha256": hashlib.sha256(b"new").hexdigest()}}),
        ("/finish_weight_update", {"weight_version": "v2"}),
        ("/resume", None),
    ]


def test_a_server_that_refuses_goes_on_with_the_former_draft(vllm: StandIn, new: Path, served: Path):
    vllm.refuses = "/update_weights"
    with pytest.raises(
        EngineError, match=r"refused /update_weights \(500\) and serves the former draft: other fc.weight"
    ):
        exchange_draft(vllm.url, new, served, "v2", 10)
    assert vllm.calls[-1][0] == "/resume"


def test_a_server_without_dev_mode_is_told_how_to_start(vllm: StandIn, new: Path, served: Path):
    vllm.refuses, vllm.status = "/pause?mode=wait", 404
    with pytest.raises(
        EngineError, match=r"VLLM_SERVER_DEV_MODE=1 PYTHONPATH=\S+ vllm serve … --host 127.0.0.1 .*served"
    ):
        exchange_draft(vllm.url, new, served, "v2", 10)


def test_another_machine_is_not_asked(new: Path, served: Path):
    with pytest.raises(ConfigError, match="of this machine"):
        exchange_draft("http://10.0.0.1:8000", new, served, "v2", 10)
    assert (served / "model.safetensors").read_bytes() == b"old"


def test_a_folder_without_a_draft_is_not_replaced(vllm: StandIn, new: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no config.json"):
        exchange_draft(vllm.url, new, tmp_path, "v2", 10)
    assert not vllm.calls


def test_the_plugin_is_found_by_its_folder_alone():
    from importlib.metadata import distributions

    [found] = distributions(path=[str(PLUGIN)])
    [entry] = found.entry_points
    assert (entry.group, entry.value) == ("vllm.general_plugins", "draftworks_weight_folder:register")
    assert (PLUGIN / "draftworks_weight_folder.py").is_file()
