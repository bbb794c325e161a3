"""Log lines on the terminal: the reason of a failure is among the last, even on a slow machine."""

from __future__ import annotations

import os

import pytest
from test_spec_assets_command_line import execute

from spec_assets.console import open_terminal


@pytest.fixture
def stuck_tail(tmp_path):
    """A PATH on which `tail` never copies a line, as under heavy load."""
    tail = tmp_path / "bin" / "tail"
    tail.parent.mkdir()
    tail.write_text("#!/bin/sh\nexec sleep 600\n")
    tail.chmod(0o755)
    return f"{tail.parent}{os.pathsep}{os.environ['PATH']}"


def test_the_last_lines_are_the_cause_though_nothing_of_a_step_is_copied(site, stuck_tail):
    site.chats.write_text("not json\n")
    finished = execute(site, "prepare", "small", PATH=stuck_tail)
    assert finished.returncode == 1
    step, cause, verdict = finished.stderr.splitlines()[-3:]
    assert "target_model           ERROR failed: data set chats: chats.jsonl: no row can be read" in step
    assert "prepare                ERROR target_model failed: data set chats: chats.jsonl: no row can be read" in cause
    assert verdict.startswith("Error: Run ")  # Dagster's own
    assert "Traceback" not in finished.stderr


def test_lines_reach_the_terminal_though_stderr_is_turned_into_a_file(capfd, tmp_path):
    import sys

    from dagster._core.execution.compute_logs import redirect_to_file

    with open_terminal() as line, redirect_to_file(sys.stderr, str(tmp_path / "step.err")):
        line.write("why it failed\n")
        print("noise", file=sys.stderr)
    assert capfd.readouterr().err == "why it failed\n"
    assert (tmp_path / "step.err").read_text() == "noise\n"
