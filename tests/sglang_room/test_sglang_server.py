"""A server that Draftworks starts: its arguments keep all hidden states; failed starts are reported and cleaned up.
A key reaches the server's arguments, and neither its command line nor its log.
Ranks of a job find each other's servers by files in a folder that they share.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import wait_until_ended
from waiting import growing_limits, wait_until

from draftworks.errors import ConfigError, EngineError
from draftworks.servers import start
from draftworks.servers.start import (
    HIDDEN,
    VARIABLE,
    build_headers,
    hide_in_log_records,
    make_key_file,
    read_key,
    take_key_arguments,
)
from draftworks.sglang.environment import SGLANG, require_capturing
from draftworks.sglang.hook import format_hook_option
from draftworks.sglang.job_servers import (
    JobServers,
    ServerAddress,
    ServerSlot,
    make_servers_folder,
    remove_servers_folders,
)
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
    assert SGLANG.require_version(make_python(tmp_path, "", version="0.5.9")) == "0.5.9"
    assert "is SGLang 0.5.9; Draftworks was tested with 0.5.23" in caplog.text
    with pytest.raises(ConfigError, match=r"has no SGLang"):
        SGLANG.require_version(Path(sys.executable))
    with pytest.raises(ConfigError, match=r"nowhere .*cannot be run.*make sglang-env"):
        SGLANG.require_version(tmp_path / "nowhere")


@pytest.fixture
def _same_records() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


def test_a_key_is_new_and_its_file_is_its_owners_from_the_first_moment(tmp_path: Path):
    for name in ("a", "b"):
        make_key_file(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    keys = {read_key(tmp_path / name) for name in ("a", "b")}
    assert len(keys) == 2
    assert all(len(key) >= 32 and key.isascii() and not key.isspace() for key in keys)
    with pytest.raises(FileExistsError):
        make_key_file(tmp_path / "a")
    assert build_headers(None) == {}


def test_a_server_without_a_key_has_no_more_arguments():
    assert take_key_arguments({}) == []


@pytest.mark.usefixtures("_same_records")
def test_log_records_do_not_have_the_key(caplog):
    hide_in_log_records("secret/key")
    with caplog.at_level(logging.INFO):
        logging.getLogger("any").info("args=%s of %s", {"api_key": "secret/key"}, "secret/key")
        logging.getLogger("any").info("all %d%%", 5)
    assert caplog.messages == [f"args={{'api_key': '{HIDDEN}'}} of {HIDDEN}", "all 5%"]


PROGRAM = """
import argparse, logging, os, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, force=True, stream=sys.stdout, format="%(message)s")
key = Path(os.environ["KEY"]).read_text()
parser = argparse.ArgumentParser()
parser.add_argument("word")
parser.add_argument("--api-key")
assert vars(parser.parse_args()) == {"word": "one", "api_key": key}, sys.argv
assert key.encode() not in Path("/proc/self/cmdline").read_bytes()
assert "DRAFTWORKS_SERVER_KEY_FILE" not in os.environ
logging.getLogger("server").info(f"server_args={sys.argv}")
"""


def test_a_program_has_the_key_in_its_arguments_alone(tmp_path: Path, monkeypatch):
    make_key_file(tmp_path / "key")
    (tmp_path / "key").write_text("-" + read_key(tmp_path / "key"))  # as one of 64 begins
    for name in (VARIABLE, "KEY"):
        monkeypatch.setenv(name, str(tmp_path / "key"))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, *start.build_command(tmp_path, "program"), "one"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"'--api-key={HIDDEN}'" in done.stdout
    assert read_key(tmp_path / "key") not in done.stdout + done.stderr


@pytest.fixture
def first(tmp_path: Path) -> JobServers:
    return JobServers(make_servers_folder(tmp_path), "127.0.0.1", rank=0, world_size=3)


def read_urls(servers: JobServers) -> dict[ServerSlot, str]:
    addresses = {slot: servers.read_address(name) for slot, name in servers.list_names().items()}
    return {slot: address.url for slot, address in addresses.items() if address is not None}


def test_every_job_has_a_folder_and_a_key_of_its_own_which_only_the_owner_reads(tmp_path: Path, first):
    second = replace(first, folder=make_servers_folder(tmp_path))
    assert first.read_key() != second.read_key()
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert first.key_file.stat().st_mode & 0o777 == 0o600
    remove_servers_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_started_again_has_a_new_name_and_one_address(first):
    other = replace(first, rank=2)
    first.publish(0, ServerAddress("http://a:1", "/spool"))
    first.publish(1, ServerAddress("http://a:2", "/spool"))
    before = other.list_names()
    assert read_urls(other) == {ServerSlot(0, 0): "http://a:1", ServerSlot(0, 1): "http://a:2"}
    first.publish(0, ServerAddress("http://a:3", "/spool"))
    assert read_urls(other) == {ServerSlot(0, 0): "http://a:3", ServerSlot(0, 1): "http://a:2"}
    assert other.list_names()[ServerSlot(0, 0)] != before[ServerSlot(0, 0)]
    assert other.read_address(before[ServerSlot(0, 0)]) is None
    first.withdraw(0)
    first.withdraw(0)
    assert read_urls(other) == {ServerSlot(0, 1): "http://a:2"}


def test_peers_are_the_servers_of_other_ranks(first):
    slots = [ServerSlot(0, 0), ServerSlot(0, 1), ServerSlot(2, 0), ServerSlot(2, 1)]
    assert list(replace(first, rank=1).list_peer_slots(2)) == slots


def test_ranks_that_only_serve_learn_when_to_begin_and_when_to_end(first):
    assert (first.is_requested, first.is_over) == (False, False)
    first.request_service()
    assert (first.is_requested, first.is_over) == (True, False)
    first.end_service()
    assert first.is_over


def test_nothing_is_published_in_a_folder_that_rank_0_has_removed(tmp_path: Path, first):
    remove_servers_folders(tmp_path)
    with pytest.raises(FileNotFoundError):
        first.publish(0, ServerAddress("http://a:1", "/spool"))
    first.withdraw(0)
    assert (first.list_names(), first.is_over, first.is_requested) == ({}, True, False)
    assert list(tmp_path.iterdir()) == []
