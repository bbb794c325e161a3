"""Runs tests on a copy of the checkout with a defect in it, each time in a fork of a process with the heavy imports."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import pytest

from tools.planted_defects.defects import Defect
from tools.planted_defects.stages import ImportMap, Stage

HEAVY = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "safetensors.torch"),
    *("transformers", "transformers.models.llama.modeling_llama", "dagster", "pyarrow.parquet", "pandas", "hypothesis"),
)
LOOK_S = 0.5
RECORD = "outcomes.txt"
ENDED = (0, 1, 2, 5)
"""Exit codes of pytest that ran: all passed, some failed, stopped at a failure, nothing selected."""
COSTLY = frozenset({"finished", "train_stored"})
"""Fixtures that take a minute."""
WALL_PER_CPU = 20
"""Seconds by the clock for a second of the budget: tests that hang take no processor time."""


@dataclass(frozen=True)
class Verdict:
    """What the tests say of a defect.

    Attributes:
        noticed_by: the first test that failed with the defect and passes without it; None if none did.
        stage: where it was, or the last one that was run.
        judged: False if the processor time was over before all stages were run.
        seconds: of processor time.
    """

    id: str
    edit: str
    noticed_by: str | None
    stage: str
    judged: bool
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What one run of tests came to: its first failure, if any; whether it ended by itself; its processor time."""

    failed: str | None
    finished: bool
    seconds: float


def import_heavy() -> None:
    for name in HEAVY:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)  # a process with several may not be forked
    gc.collect()
    gc.freeze()


class Judge:
    """Judges defects in a copy, which is the current folder and first on the path of imports.

    Args:
        notes: a folder for what the tests print.
        budget_s: processor time for a defect.
    """

    def __init__(self, copy: Path, notes: Path, budget_s: float) -> None:
        self._copy, self._notes, self._budget_s = copy, notes, budget_s
        self._imports = ImportMap(copy)
        self._marks = read_marks(copy / "Makefile")
        self._stamp = int(time.time()) - 10_000_000
        self._failing: set[str] = set()

    def judge(self, defect: Defect) -> Verdict:
        """Run the tests that may notice a defect, nearest first, until one fails."""
        left_s, stage = self._budget_s, Stage("none", [])
        for stage in self._imports.order_stages(defect.file):
            outcome = self._run_planted(defect, stage, left_s)
            left_s -= outcome.seconds
            spent = round(self._budget_s - left_s, 1)
            if outcome.failed or not outcome.finished or left_s <= 0:
                return Verdict(defect.id, defect.edit, outcome.failed, stage.name, bool(outcome.failed), spent)
        return Verdict(defect.id, defect.edit, None, stage.name, True, round(self._budget_s - left_s, 1))

    def doubt(self, verdicts: Iterable[Verdict]) -> set[str]:
        """Return the defects noticed by tests that fail without a defect too, which say nothing. They are not asked again."""
        noticed = {each.id: each.noticed_by for each in verdicts if each.noticed_by is not None}
        tests = set(noticed.values()) - self._failing
        if tests:
            self._run(sorted({test.partition("::")[0] for test in tests}), math.inf, "without", tests)
            passed = _read_record(self._notes, "passed")
            self._failing |= {test for test in tests if not any(_is_part(each, test) for each in passed)}
        return {name for name, test in noticed.items() if test in self._failing}

    def _run_planted(self, defect: Defect, stage: Stage, left_s: float) -> Outcome:
        path = self._copy / defect.file
        text, stat = path.read_text(), path.stat()
        self._stamp += 10  # bytecode is kept by size and second
        path.write_text(defect.plant_in(text))
        os.utime(path, (self._stamp, self._stamp))
        try:
            return self._run(stage.files, left_s, f"{defect.id}.{stage.name}")
        finally:
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _run(self, files: list[str], left_s: float, name: str, only: Collection[str] | None = None) -> Outcome:
        """Run the tests of files up to the first failure, or `only` these tests, all of them."""
        record = self._notes / RECORD
        record.unlink(missing_ok=True)
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-m", self._marks, "-o", "timeout=300"]
        how = ["-x"] if only is None else ["--continue-on-collection-errors"]
        skipped = [word for test in sorted(self._failing) for word in ("--deselect", test)]
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_forked([*options, *how, *skipped, *files], self._notes / f"{name}.log", Recorder(record, only))
        outcome = wait_for_fork(pid, left_s)
        failed = next(iter(_read_record(self._notes, "failed")), None)
        return replace(outcome, failed=failed, finished=outcome.finished or failed is not None)


def _read_record(notes: Path, outcome: str) -> list[str]:
    """Return the tests of the last run that had this outcome."""
    record = notes / RECORD
    lines = [line.partition(" ") for line in record.read_text().splitlines()] if record.exists() else []
    return [test for found, _, test in lines if found == outcome]


def _is_part(test: str, whole: str) -> bool:
    """Whether a test is the one named, or of the file named: a file can fail as a whole."""
    return test == whole or test.startswith(f"{whole}::")


class Recorder:
    """A plug-in of pytest that writes down what comes of tests, and has costly ones run last; `only` leaves others out."""

    def __init__(self, record: Path, only: Collection[str] | None) -> None:
        self._record, self._only = record, only

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._only is not None:
            items[:] = [item for item in items if any(_is_part(item.nodeid, each) for each in self._only)]
        order = {str(config.rootpath / name.split("::")[0]): index for index, name in enumerate(config.args)}

        def find_cost(item: pytest.Item) -> tuple[bool, int]:
            costly = item.get_closest_marker("slow") or not COSTLY.isdisjoint(getattr(item, "fixturenames", ()))
            return bool(costly), order.get(str(item.path), 0)

        items.sort(key=find_cost)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed or (report.passed and getattr(report, "when", "") == "call"):
            with self._record.open("a") as file:
                file.write(f"{report.outcome} {report.nodeid}\n")


def _run_forked(arguments: list[str], log: Path, recorder: Recorder) -> None:
    """Become a session of its own that runs pytest, and end."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        code = int(pytest.main(arguments, plugins=[recorder]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait_for_fork(pid: int, left_s: float) -> Outcome:
    """Wait for a forked run of pytest; end it and all of its session once its processor time is over."""
    began, finished, measured = time.monotonic(), True, 0.0
    try:
        while True:
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if found:
                break
            measured = max(measured, measure_tree(pid))
            if finished and (measured > left_s or time.monotonic() - began > WALL_PER_CPU * left_s):
                finished = False
                end_session(pid)
            time.sleep(LOOK_S)
    finally:
        end_session(pid)  # of what is left, also where this run is interrupted
    code = os.waitstatus_to_exitcode(status)
    # A run that crashed, or that somebody killed, has not finished: it says nothing of the defect.
    return Outcome(None, finished and code in ENDED, max(measured, usage.ru_utime + usage.ru_stime))


def measure_tree(pid: int) -> float:
    """Return the processor time of a process, of its living descendants and of those that they waited for."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            total += sum(each.cpu_times()[:4])
    except psutil.NoSuchProcess:
        pass
    return total


def end_session(leader: int) -> None:
    """Kill what is left of the session of a process that this one forked, and its descendants in sessions of their own."""
    found: set[psutil.Process] = set()
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == leader:
                found |= {each, *each.children(recursive=True)}
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    for each in found:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue


def read_marks(makefile: Path) -> str:
    """Return the marks that `make test` selects by."""
    found = re.search(r"-m '(not long[^']*)'", makefile.read_text())
    if found is None:
        raise ValueError(f"{makefile}: expected a line with -m 'not long ...', by which make test selects tests")
    return found[1]


def append_verdict(results: Path, verdict: Verdict) -> None:
    with results.open("a") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")


def read_verdicts(results: Path, defects: Iterable[Defect]) -> dict[str, Verdict]:
    """Return the last verdict of each defect that has not changed since."""
    edits = {defect.id: defect.edit for defect in defects}
    lines = results.read_text().splitlines() if results.is_file() else []
    verdicts = [Verdict(**json.loads(line)) for line in lines]
    return {each.id: each for each in verdicts if edits.get(each.id) == each.edit}
