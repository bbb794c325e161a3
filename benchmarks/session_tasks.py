"""Tasks of a session on a GPU: what they are, how long each may take, and processes that are killed when it is over."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from session_rows import RowFile

LEAST_SECONDS = 4.0
"""A task that would get less is left out."""
AHEAD = 3
"""Processes that prepare on the CPU while another has the device."""
PREPARE_SECONDS = 60.0
"""Longest wait for a process that still prepares when its turn has come."""


@dataclass(frozen=True)
class Settings:
    """What all tasks of a session measure.

    Attributes:
        device: cuda or cpu.
        size: a name of `gpu_cases.SHAPES`.
        lengths: tokens of the samples of a step.
        wheels: where peers are found, beside what Python finds itself.
    """

    device: str
    size: str
    lengths: tuple[int, ...]
    steps: int
    warm_up: int
    wheels: Path | None = None


@dataclass(frozen=True)
class Task:
    """A process of its own.

    Attributes:
        work: `module:function`, called with this task, the settings, the file of rows, and a function that returns when
            the device is free.
        cap: most seconds with the device.
    """

    part: str
    name: str
    work: str
    cap: float
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    tasks: tuple[Task, ...]


Work = Callable[[Task, Settings, RowFile, Callable[[], None]], None]


def allow(task: Task, part_left: float, session_left: float) -> float:
    """Return the seconds that a task gets of what is left of its part and of the session; 0: it is left out."""
    seconds = min(task.cap, part_left, session_left)
    return seconds if seconds >= min(LEAST_SECONDS, task.cap) else 0.0


def keep_open(parts: Sequence[Part], rows: RowFile, resume: bool, only: Sequence[str] = ()) -> list[Part]:
    """Leave out the tasks that ran to their end, and those in whose names none of `only` is."""
    kept = []
    for part in parts:
        tasks = [each for each in part.tasks if not only or any(word in each.name.split() for word in only)]
        tasks = [each for each in tasks if not (resume and rows.ended(part.name, each.name))]
        kept.append(Part(part.name, part.seconds, tuple(tasks)))
    return kept


@dataclass(frozen=True)
class Session:
    """Runs tasks in order. Each begins early, on the CPU, and is let onto the device when the one before has ended."""

    settings: Settings
    rows: RowFile
    method: str = "fork"

    def run(self, parts: Sequence[Part], budget: float) -> None:
        end = time.monotonic() + budget
        for part in parts:
            part_end = time.monotonic() + part.seconds
            waiting, started = list(part.tasks), []
            try:
                while waiting or started:
                    while waiting and len(started) < AHEAD:
                        started.append(Running(waiting.pop(0), self.settings, self.rows, self.method))
                    now = time.monotonic()
                    running = started.pop(0)
                    running.finish(allow(running.task, part_end - now, end - now))
            finally:
                for running in started:
                    running.kill()


class Running:
    """A task's process."""

    def __init__(self, task: Task, settings: Settings, rows: RowFile, method: str) -> None:
        self.task, self._rows = task, rows
        context: BaseContext = multiprocessing.get_context(method)
        self._turn, self._ready = context.Event(), context.Event()
        given = (task, settings, rows, self._turn, self._ready)
        self._process: BaseProcess = context.Process(target=run_task, args=given)  # pyright: ignore[reportAttributeAccessIssue]
        self._process.start()

    def finish(self, seconds: float) -> None:
        """Let the task onto the device, and wait for its end at most so long; 0 is not at all."""
        if not seconds:
            self.kill()
            self._rows.add(self.task.part, self.task.name, problem="left out: no time is left")
            return
        wait = time.monotonic() + min(PREPARE_SECONDS, seconds)
        while not self._ready.is_set() and self._process.is_alive() and time.monotonic() < wait:
            self._ready.wait(0.1)
        self._turn.set()
        self._process.join(seconds)
        if self._process.is_alive():
            self.kill()
            self._rows.add(self.task.part, self.task.name, problem=f"killed after {seconds:.0f} s")
        elif self._process.exitcode:
            self._rows.add(self.task.part, self.task.name, problem=f"ended with exit code {self._process.exitcode}")

    def kill(self) -> None:
        """End the process, and those that it has started."""
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet
                self._process.kill()
        self._process.join()


def run_task(task: Task, settings: Settings, rows: RowFile, turn: Any, ready: Any) -> None:
    """Body of a task's process; what it prints itself goes to a log beside the rows."""
    os.setsid()
    log = os.open(rows.path.with_suffix(".log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 2)
    begin = time.monotonic()

    def wait() -> None:
        nonlocal begin
        ready.set()
        turn.wait()
        begin = time.monotonic()

    try:
        load_work(task.work)(task, settings, rows, wait)
        rows.add(task.part, task.name, ended=round(time.monotonic() - begin, 1))
    except BaseException as error:  # it is this task's row, and the session goes on
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        rows.add(task.part, task.name, problem=f"{type(error).__name__}: {first}"[:300])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def load_work(work: str) -> Work:
    module, name = work.split(":")
    return getattr(importlib.import_module(module), name)
