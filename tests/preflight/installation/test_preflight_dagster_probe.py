"""What Dagster's own program reports is taken line by line, also where it hangs or ends with an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from waiting import HANG_S, growing_limits

from draftworks.preflight.installation.deployment_probes import probe_dagster

GOOD = '{"severity": "ok", "text": "the storage answers", "where": "dagster", "remedy": ""}'


@pytest.mark.parametrize(
    ("ending", "states", "words"),
    [
        ("", ["ok"], "the storage answers"),
        ("import time; time.sleep(2000)", ["ok", "warning"], "not looked at within"),
        ("raise SystemExit('no module named x')", ["ok", "error"], "no module named x"),
    ],
)
def test_lines_are_kept_whatever_comes_after(tmp_path: Path, ending: str, states: list[str], words: str):
    program = tmp_path / "jobs" / "instance_report.py"
    program.parent.mkdir()
    (program.parent / "__init__.py").touch()
    program.write_text(f"print('a warning of a library')\nprint({GOOD!r}, flush=True)\n{ending}\n")
    for limit_s in growing_limits(2.0) if "sleep" in ending else [HANG_S]:
        found = list(probe_dagster(tmp_path, {"PATH": os.environ["PATH"]}, tmp_path, limit_s=limit_s))
        if len(found) == len(states):
            break
    assert [line.severity for line in found] == states
    assert words in found[-1].text
