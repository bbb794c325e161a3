"""A pytest plugin that prints the processor seconds of each room, and of the dearest tests, with all that they started."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_starts

OUTPUT = "seconds_by_room"
OUTPUT_OF_TESTS = "seconds_by_test"
ELSEWHERE = "imports, collection, servers"
DEAREST = 25
"""Tests that are printed; a fixture's seconds are those of the first test that asks for it."""
DEAR_S = 1.0
"""A test of less is never printed."""


def used_seconds() -> float:
    """Processor time of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class SecondsByRoom:
    """Counts in each worker, which hands its sums to the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self._tests = Path(config.rootpath) / "tests"
        self._worker: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._has_workers = self._worker is None and bool(getattr(config.option, "numprocesses", None))
        self._seconds: Counter[str] = Counter()
        self._tests_seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = used_seconds()
        result = yield
        seconds = used_seconds() - before
        self._seconds[self._room_of(item.path)] += seconds
        if seconds >= DEAR_S:
            self._tests_seconds[item.nodeid] = seconds
        return result

    def _room_of(self, path: Path) -> str:
        return path.relative_to(self._tests).parts[0] if path.is_relative_to(self._tests) else path.parent.name

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._has_workers:
            own, server = os.times(), warm_starts.find_server()
            self._seconds[ELSEWHERE] += own.user + own.system + (_of(psutil.Process(server)) if server else 0)
            return
        self._seconds[ELSEWHERE] += used_seconds() + _of_living_children() - self._seconds.total()
        if self._worker is not None:
            self._worker[OUTPUT] = dict(self._seconds)
            self._worker[OUTPUT_OF_TESTS] = dict(self._tests_seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        given = getattr(node, "workeroutput", {})
        self._seconds.update(given.get(OUTPUT, {}))
        self._tests_seconds.update(given.get(OUTPUT_OF_TESTS, {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = [*self._seconds.most_common(), ("all", self._seconds.total())]
        terminalreporter.section("processor seconds by room, and of the dearest tests")
        terminalreporter.write_line("  ".join(f"{room} {seconds:.0f}" for room, seconds in rows if seconds >= 0.5))
        for test, seconds in self._tests_seconds.most_common(DEAREST):
            terminalreporter.write_line(f"{seconds:6.1f}  {test}")


def _of_living_children() -> float:
    return sum(map(_of, psutil.Process().children(recursive=True)))


def _of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
