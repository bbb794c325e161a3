"""A pytest plugin that prints, after a run, the processor seconds of each room's tests and of all that they started."""

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
ELSEWHERE = "imports, collection, servers"


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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = used_seconds()
        result = yield
        self._seconds[self._room_of(item.path)] += used_seconds() - before
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

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get(OUTPUT, {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = [*self._seconds.most_common(), ("all", self._seconds.total())]
        terminalreporter.section("processor seconds by room")
        terminalreporter.write_line("  ".join(f"{room} {seconds:.0f}" for room, seconds in rows if seconds >= 0.5))


def _of_living_children() -> float:
    return sum(map(_of, psutil.Process().children(recursive=True)))


def _of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
