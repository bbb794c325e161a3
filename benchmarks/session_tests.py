"""Work of a session on a GPU: `tests/gpu` with a row for each test, what failed before first."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from session_rows import RowFile
from session_steps import Ready
from session_tasks import Settings, Task

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 6


class RowPlugin:
    """Writes a row as each test ends."""

    def __init__(self, task: Task, rows: RowFile) -> None:
        self._task, self._rows = task, rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        told: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome == "failed":
            told["problem"] = first_message(report)
        self._rows.add(self._task.part, self._task.name, key=report.nodeid, **told)


def first_message(report: Any) -> str:
    """Return the first line of what a failed test said."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return next(iter(str(crash.message if crash else report.longrepr).splitlines()), "")[:300]


def run_tests(task: Task, settings: Settings, rows: RowFile, ready: Ready) -> None:
    """Run those that have no row yet. On a GPU in several processes: most of their time is the host's."""
    ready()
    os.chdir(ROOT)
    before = list(rows.read(task.part))
    known = {row["key"] for row in before if row.get("outcome") in ("passed", "skipped")}
    failed = [row["key"] for row in before if row.get("outcome") == "failed" and row["key"] not in known]
    arguments = [
        *dict.fromkeys(failed),
        *(task.arguments or ("tests/gpu",)),
        "-o",
        "timeout=60",
        "-p",
        "no:cacheprovider",
    ]
    arguments += [f"--deselect={name}" for name in sorted(known)]
    if settings.device == "cuda" and importlib.util.find_spec("xdist"):
        arguments += ["-n", str(WORKERS), "--dist", "worksteal"]
    code = pytest.main(arguments, plugins=[RowPlugin(task, rows)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code}")
