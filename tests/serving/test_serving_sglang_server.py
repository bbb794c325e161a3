"""A server of ours: its arguments lose nothing, and whatever goes wrong at the start is told and cleaned up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import ends

from draftworks.errors import ConfigError, EngineError
from draftworks.serving.sglang_environment import require_version
from draftworks.serving.sglang_server import ServerOptions, SGLangServer

OPTIONS = ServerOptions(
    model="models/toy", revision=None, tokenizer="models/toy", context=512, dtype="float32", device="cpu",
    layer_ids=(1, 3), spool=Path("spool"),
)  # fmt: skip


def python_that(folder: Path, serving: str, version: str = "0.5.23") -> Path:
    """A stand-in for SGLang's Python: says a version, and runs a script as the server."""
    script = folder / "server.py"
    script.write_text(serving)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec echo {version}\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    return python


def server(python: Path, folder: Path, timeout_s: float = 20.0) -> SGLangServer:
    return SGLangServer(python, replace(OPTIONS, spool=folder / "spool"), folder, timeout_s, grace_s=0.5)


def test_what_loses_hidden_states_is_off():
    arguments = OPTIONS.arguments(port=1)
    assert "--disable-radix-cache" in arguments
    assert arguments[arguments.index("--chunked-prefill-size") + 1] == "-1"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    layers = arguments.index("--return-aux-hidden-state-layer-ids")
    assert arguments[layers + 1 : layers + 3] == ["1", "3"]
    (hook,) = json.loads(arguments[arguments.index("--forward-hooks") + 1])
    assert hook["config"] == {"spool": "spool"}


def test_on_a_gpu_prompts_run_outside_of_graphs_which_would_skip_the_hook():
    assert "--disable-prefill-cuda-graph" in replace(OPTIONS, device="cuda").arguments(1)
    assert "--disable-prefill-cuda-graph" not in replace(OPTIONS, device="cuda", layer_ids=()).arguments(1)


def test_a_server_that_ends_at_once_is_told_with_the_end_of_its_log(tmp_path: Path):
    failing = server(python_that(tmp_path, "print('CUDA out of memory'); raise SystemExit(3)"), tmp_path)
    with pytest.raises(EngineError, match=r"(?s)ended with code 3 before it served.*CUDA out of memory"):
        failing.start()
    assert not failing.runs()


def test_a_server_that_is_never_ready_is_ended_with_its_children(tmp_path: Path):
    hanging = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    slow = server(python_that(tmp_path, hanging), tmp_path, timeout_s=3)
    with pytest.raises(EngineError, match="was not ready within 3 s"):
        slow.start()
    assert slow.pid is None
    with suppress(psutil.NoSuchProcess):
        assert ends(psutil.Process(int((tmp_path / "child").read_text())), within_s=10)


SERVING = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print(sorted(name for name in os.environ if name in ("RANK", "MASTER_ADDR")), os.environ["PYTHONPATH"], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def test_a_server_serves_until_it_is_stopped_and_sees_no_process_group(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    serving = server(python_that(tmp_path, SERVING), tmp_path)
    serving.start()
    process = psutil.Process(serving.pid)
    assert serving.runs()
    environment, path = serving.log.read_text().split(maxsplit=1)
    assert environment == "[]"
    assert os.listdir(path.strip().splitlines()[0]) == ["draftworks"]
    serving.stop()
    serving.stop()
    assert not serving.runs()
    assert not process.is_running()


def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path: Path):
    python = python_that(tmp_path, SERVING)
    owner_code = (
        "import sys, time; from pathlib import Path; from dataclasses import replace\n"
        "sys.path[:0] = sys.argv[1:3]; import test_serving_sglang_server as t\n"
        "s = t.server(Path(sys.argv[3]), Path(sys.argv[4])); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", owner_code, str(here), str(here.parent), str(python), str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    process = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    assert ends(process, within_s=30), Path(f"/proc/{process.pid}/status").read_text()


def test_wrong_missing_and_absent_sglang_are_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"expected SGLang 0.5.23, .* found 0.5.9. Install that version"):
        require_version(python_that(tmp_path, "", version="0.5.9"))
    with pytest.raises(ConfigError, match=r"has no SGLang"):
        require_version(Path(sys.executable))
    with pytest.raises(ConfigError, match=r"nowhere .*cannot be run.*make sglang-env"):
        require_version(tmp_path / "nowhere")
