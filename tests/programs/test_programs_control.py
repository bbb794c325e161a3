"""The control server as a process: what it refuses. That it serves is shown by tests/dataflow/test_stream_control_server.py."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from draftworks.programs import control
from draftworks.stream.control_wire import TOKEN_ENV


def run_program(*words: str, token: str = "a secret of the tests") -> tuple[int, str]:
    app = typer.Typer()
    app.command()(control.main)
    done = CliRunner().invoke(app, list(words), env={TOKEN_ENV: token})
    return done.exit_code, done.output.strip()


@pytest.fixture(autouse=True)
def signals_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "raise_on_stop", lambda: None)


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    plane = str(tmp_path / "plane.db")
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    for words, said in (
        ((plane, "--listen", "nowhere"), "expected an address as host:port"),
        ((plane, "--listen", "203.0.113.1:7420"), "cannot listen on 203.0.113.1:7420"),
        ((str(other),), "found another program's"),
        ((plane, "--token-file", str(tmp_path / "absent")), "shared secret"),
    ):
        code, output = run_program(*words)
        assert code == 1
        assert said in output
        assert "\n" not in output
    code, output = run_program(plane, "--listen", "127.0.0.1:0", token="short")
    assert code == 1
    assert "at least 16 bytes" in output
