"""`draftworks run` and `draftworks ui` refuse what would not work before anything is started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from draftworks.programs import start
from draftworks.programs.cli import app


@pytest.fixture
def started(monkeypatch):
    """Record the arguments and environment of processes instead of starting them."""
    calls = []

    def note(arguments):
        calls.append((arguments, start.build_dagster_environment()))
        return 0

    monkeypatch.setattr(start, "replace_process", note)
    monkeypatch.setattr(start, "run_in_process_group", note)
    return calls


def ask(*words: str):
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "everything", "--target", "tny"], "tny.yaml: no such file; did you mean tiny?"),
        (["run", "everything", "--target", "../tiny"], "targets"),
        (["run", "everything", "--target", "tiny", "-c", "overides.yaml"], "overides.yaml: no such file"),
        (["run", "everything", "--target", "tiny", "-f", "nowhere.py"], "nowhere.py: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(words, reason, started):
    asked = ask(*words)
    assert asked.exit_code == 1
    assert started == []
    assert len(asked.stderr.splitlines()) == 1
    assert asked.stderr.startswith("error: ")
    assert reason in asked.stderr


@pytest.fixture
def fleet(tmp_path):
    """A registry folder with a valid target, and one whose entry has a misspelt key."""
    for name in ("targets", "datasets"):
        (tmp_path / "fleet" / name).mkdir(parents=True)
    (tmp_path / "fleet" / "datasets" / "chats.yaml").write_text("files: ['*.jsonl']\n")
    (tmp_path / "fleet" / "targets" / "good.yaml").write_text("model: models/good\ndataset: chats\n")
    (tmp_path / "fleet" / "targets" / "bad.yaml").write_text("model: models/bad\ndataset: chats\nmax_lenght: 64\n")
    return tmp_path / "fleet"


def test_a_run_of_another_registry_gets_its_code_location(started, fleet):
    asked = ask("run", "prepare", "-t", "good", "--registry", str(fleet))
    assert asked.exit_code == 0
    assert asked.stdout.startswith("prepare of target good: starting")  # before Dagster is loaded, which takes seconds
    location = fleet.parent / "var" / "code_location" / "definitions.py"
    assert started[0][0] == ["-m", "jobs.run", "prepare", "--target", "good", "-f", str(location)]
    assert location.is_file()


def test_the_ui_of_another_registry_gets_its_workspace(started, fleet):
    pytest.importorskip("dagster_webserver")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ask("ui", "--port", str(port), "--registry", str(fleet))
    assert started[0][0][:4] == ["-m", "dagster", "dev", "-w"]
    assert started[0][0][4] == str(fleet.parent / "var" / "code_location" / "workspace.yaml")


def test_the_checkouts_registry_is_the_module_by_whatever_path_it_is_given(started):
    ask("run", "prepare", "-t", "tiny", "--registry", str(start.CHECKOUT / "docs" / ".." / "registry"))
    assert started[0][0] == ["-m", "jobs.run", "prepare", "--target", "tiny"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("targets/good.yaml", "model: models/good\ndataset: chat\n"),
            "dataset: no file datasets/chat.yaml; did you mean chats?",
        ),
        (
            ("targets/good.yaml", "model: models/good\ndataset: chats\nevals: [code]\n"),
            "evals: no file evals/code.yaml; there are: none",
        ),
        (("deployment.yaml", "vra: elsewhere\n"), "deployment.yaml: unknown key vra; did you mean var?"),
        (("targets/good.yaml", "model: models/good\ndataset: chats\nmax_lenght: 8\n"), "did you mean max_length?"),
    ],
)
def test_an_invalid_entry_starts_nothing(change, reason, started, fleet):
    (fleet / change[0]).write_text(change[1])
    asked = ask("run", "everything", "-t", "good", "--registry", str(fleet))
    assert (asked.exit_code, started) == (1, [])
    assert asked.stderr.startswith("error: ")
    assert reason in asked.stderr


def test_a_folder_that_is_no_registry_starts_nothing(started, tmp_path):
    for words in (("run", "everything"), ("ui", "--port", "0")):
        asked = ask(*words, "--registry", str(tmp_path / "nowhere"))
        assert (asked.exit_code, started) == (1, [])
        assert "nowhere a registry?" in asked.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_a_registry_are_not_given_together(started, fleet):
    file = fleet / "location.py"
    file.write_text("")
    asked = ask("run", "prepare", "-t", "good", "--registry", str(fleet), "-f", str(file))
    assert (asked.exit_code, started) == (1, [])
    assert "expected one of them" in asked.stderr


def test_a_run_is_recorded_where_the_ui_looks_unless_told_otherwise(started, monkeypatch):
    monkeypatch.delenv(start.DAGSTER_HOME, raising=False)
    ask("run", "prepare", "-t", "tiny")
    assert started[0][0] == ["-m", "jobs.run", "prepare", "--target", "tiny"]
    assert started[0][1][start.DAGSTER_HOME] == str(start.CHECKOUT / ".dagster")
    monkeypatch.setenv(start.DAGSTER_HOME, "/elsewhere")
    ask("run", "prepare", "-t", "tiny")
    assert started[1][1][start.DAGSTER_HOME] == "/elsewhere"


def test_a_taken_port_is_told_with_a_free_one_and_no_daemon_is_started(started):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asked = ask("ui", "--port", str(port))
        assert asked.exit_code == 1
        assert started == []
        assert asked.stderr.startswith(f"error: port {port} of 127.0.0.1: expected a free port, found a server")
        other = int(asked.stderr.split()[-1])
    assert start.is_port_free(other)
    pytest.importorskip("dagster_webserver")
    ask("ui", "--port", str(other))
    assert started[0][0][-1] == str(other)


HELD = """
import signal, sys, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
print("ready", flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(10 + len(told))
"""


def test_ctrl_c_reaches_the_run_once_and_its_exit_code_comes_back():
    command = (
        f"import sys; from draftworks.programs import start; sys.exit(start.run_in_process_group(['-c', {HELD!r}]))"
    )
    group = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert group.stdout.readline() == "ready\n"
    os.killpg(group.pid, signal.SIGINT)  # as a terminal does
    assert group.wait() == 11
    group.stdout.close()
