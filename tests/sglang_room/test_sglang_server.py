"""A server that Draftworks starts: its arguments keep all hidden states; failed starts are reported and cleaned up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import wait_until_ended
from waiting import growing_limits, wait_until

from draftworks.errors import ConfigError, EngineError
from draftworks.sglang.environment import require_capturing, require_version
from draftworks.sglang.hook import format_hook_option
from draftworks.sglang.server import ServerOptions, SGLangServer

OPTIONS = ServerOptions(
    model="models/toy", revision=None, tokenizer="models/toy", context=512, dtype="float32", device="cpu",
    layer_ids=(1, 3), spool=Path("spool"),
)  # fmt: skip


def make_python(folder: Path, serving: str, version: str = "0.5.23") -> Path:
    """A stand-in for SGLang's Python: prints a version, and runs a script as the server."""
    script = folder / "server.py"
    script.write_text(serving)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec echo {version}\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    return python


def make_server(python: Path, folder: Path, timeout_s: float = 20.0) -> SGLangServer:
    return SGLangServer(python, replace(OPTIONS, spool=folder / "spool"), folder, timeout_s, grace_s=0.5)


def test_what_loses_hidden_states_is_off():
    arguments = OPTIONS.build_arguments(port=1)
    assert "--disable-radix-cache" in arguments
    assert arguments[arguments.index("--chunked-prefill-size") + 1] == "-1"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    layers = arguments.index("--return-aux-hidden-state-layer-ids")
    assert arguments[layers + 1 : layers + 3] == ["1", "3"]
    (hook,) = json.loads(arguments[arguments.index("--forward-hooks") + 1])
    assert hook["config"] == {"spool": "spool"}


def test_on_a_gpu_prompts_run_outside_of_graphs_which_would_skip_the_hook():
    assert "--disable-prefill-cuda-graph" in replace(OPTIONS, device="cuda").build_arguments(1)
    assert "--disable-prefill-cuda-graph" not in replace(OPTIONS, device="cuda", layer_ids=()).build_arguments(1)


def test_a_server_that_ends_at_once_is_told_with_the_end_of_its_log(tmp_path: Path):
    failing = make_server(make_python(tmp_path, "print('CUDA out of memory'); raise SystemExit(3)"), tmp_path)
    with pytest.raises(EngineError, match=r"(?s)ended with code 3 before it was ready.*CUDA out of memory"):
        failing.start()
    assert not failing.is_running()


HANGING = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
os.symlink(str(child.pid), {path!r})
time.sleep(300)
"""


def test_a_server_that_is_never_ready_is_ended_with_its_children(tmp_path: Path):
    child = tmp_path / "child"
    python = make_python(tmp_path, HANGING.format(path=str(child)))
    for timeout_s in growing_limits(2):  # until it has come as far as to start a child
        slow = make_server(python, tmp_path, timeout_s)
        with pytest.raises(EngineError, match=f"was not ready within {timeout_s} s"):
            slow.start()
        assert slow.pid is None
        if child.is_symlink():
            break
    with suppress(psutil.NoSuchProcess):
        wait_until_ended(psutil.Process(int(os.readlink(child))))


SERVING = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
INFO = {"model_path": option("--model-path"), "forward_hooks": json.loads(option("--forward-hooks"))}
INFO.update(json.loads(CLAIMS))
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/server_info":
            self.wfile.write(json.dumps(INFO).encode())
print(sorted(name for name in os.environ if name in ("RANK", "MASTER_ADDR")), os.environ["PYTHONPATH"], flush=True)
HTTPServer(("127.0.0.1", int(option("--port"))), Healthy).serve_forever()
"""


def format_server_script(**claims: Any) -> str:
    """A server that reports the options that it was started with, except for `claims`."""
    return f"CLAIMS = {json.dumps(claims)!r}\n{SERVING}"


@pytest.mark.parametrize(
    ("claims", "found"),
    [
        ({"model_path": "models/other"}, "'models/other'"),
        ({"forward_hooks": json.loads(format_hook_option(Path("elsewhere")))}, "elsewhere"),
        ({"model_path": None, "forward_hooks": None}, "None"),
    ],
    ids=["another model", "another server of the same model", "no SGLang"],
)
def test_a_server_that_took_the_port_before_ours_is_not_taken_for_it(tmp_path: Path, claims, found):
    robbed = make_server(make_python(tmp_path, format_server_script(**claims)), tmp_path)
    with pytest.raises(EngineError, match=f"(?s)answered by another server.*expected .*models/toy.*found .*{found}"):
        robbed.start()
    assert robbed.pid is None


def test_a_server_serves_until_it_is_stopped_and_sees_no_process_group(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    serving = make_server(make_python(tmp_path, format_server_script()), tmp_path)
    serving.start()
    process = psutil.Process(serving.pid)
    assert serving.is_running()
    environment, path = serving.log.read_text().split(maxsplit=1)
    assert environment == "[]"
    assert os.listdir(path.strip().splitlines()[0]) == ["draftworks"]
    serving.stop()
    serving.stop()
    assert not serving.is_running()
    assert not process.is_running()


def start_owner(python: Path, folder: Path) -> subprocess.Popen[str]:
    """A process that starts a server and prints its pid once it serves."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "sys.path[:0] = sys.argv[1:3]; import test_sglang_server as t\n"
        "s = t.make_server(Path(sys.argv[3]), Path(sys.argv[4]), timeout_s=300); s.start(); print(s.pid, flush=True)\n"
        "time.sleep(300)"
    )
    here = Path(__file__).parent
    toys = here.parent / "toys"
    command = [sys.executable, "-c", code, str(here), str(toys), str(python), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path: Path):
    owner = start_owner(make_python(tmp_path, format_server_script()), tmp_path)
    assert owner.stdout is not None
    process = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    wait_until_ended(process)


LAUNCHING = """
import multiprocessing, os, sys, time

def import_for_long():
    time.sleep(300)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=import_for_long)
    child.start()
    os.symlink(str(child.pid), {path!r})
    time.sleep(300)
"""


def make_python_with_module(folder: Path, launch_server: str) -> Path:
    """A Python whose `sglang.launch_server` is a script."""
    package = folder / "libraries" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(launch_server)
    python = folder / "python"
    search = f'PYTHONPATH="$PYTHONPATH:{package.parent}"'
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec echo 0.5.23\n{search} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_nothing_a_starting_server_has_spawned_outlives_the_process_that_started_it(tmp_path: Path):
    path = tmp_path / "child"
    owner = start_owner(make_python_with_module(tmp_path, LAUNCHING.format(path=str(path))), tmp_path)
    wait_until(path.is_symlink, "the child of the server", possible=lambda: owner.poll() is None)
    child = psutil.Process(int(os.readlink(path)))
    server = psutil.Process(child.ppid())
    owner.kill()
    owner.wait()
    wait_until_ended(child)
    wait_until_ended(server)


def test_a_version_that_cannot_return_hidden_states_is_refused_where_they_are_wanted(tmp_path: Path):
    serving = make_server(make_python(tmp_path, format_server_script(), version="0.5.22"), tmp_path)
    with pytest.raises(
        ConfigError, match=r"is SGLang 0\.5\.22, which cannot return hidden states: expected 0\.5\.23 or later"
    ):
        serving.start()
    assert serving.pid is None
    for version in ("0.5.23", "0.5.24rc1", "0.6.0", "1.0.0", "main"):
        require_capturing(version, "here")


def test_untried_missing_and_absent_sglang_are_told(tmp_path: Path, caplog):
    assert require_version(make_python(tmp_path, "", version="0.5.9")) == "0.5.9"
    assert "is SGLang 0.5.9; Draftworks was tested with 0.5.23" in caplog.text
    with pytest.raises(ConfigError, match=r"has no SGLang"):
        require_version(Path(sys.executable))
    with pytest.raises(ConfigError, match=r"nowhere .*cannot be run.*make sglang-env"):
        require_version(tmp_path / "nowhere")
