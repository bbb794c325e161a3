"""What Dagster's own program reports is taken line by line, also where it hangs or ends with an error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from draftworks.preflight.installation.dagster_probe import probe_dagster

GOOD = '{"area": "dagster", "state": "ok", "found": "the storage answers", "todo": ""}'


@pytest.mark.parametrize(
    ("ending", "states", "words"),
    [
        ("", ["ok"], "the storage answers"),
        ("import time; time.sleep(60)", ["ok", "warning"], "not looked at within"),
        ("raise SystemExit('no module named x')", ["ok", "problem"], "no module named x"),
    ],
)
def test_lines_are_kept_whatever_comes_after(tmp_path: Path, ending: str, states: list[str], words: str):
    program = tmp_path / "jobs" / "instance_report.py"
    program.parent.mkdir()
    (program.parent / "__init__.py").touch()
    program.write_text(f"print('a warning of a library')\nprint({GOOD!r}, flush=True)\n{ending}\n")
    started = time.monotonic()
    found = list(probe_dagster(tmp_path, {"PATH": os.environ["PATH"]}, tmp_path, limit_s=3.0))
    assert time.monotonic() - started < 20
    assert [line.state for line in found] == states
    assert words in found[-1].found
