"""Waiting of tests, without a deadline: how long something takes is the machine's load, so only pytest-timeout ends a wait."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

POLL_S, LONGEST_POLL_S = 0.02, 0.3
"""Between two looks. One that costs much, as of all processes of the machine, is repeated less often: what is waited for
needs the processors.
"""
HANG_S = 600.0
"""For limits that must not be reached, of the product or of threads that a failing test cannot end: only what hangs
takes as long; less than pytest-timeout's, so that whoever waited says what for.
"""
T = TypeVar("T")


def wait_until(
    condition: Callable[[], object],
    awaited: str | Callable[[], str] = "",
    *,
    possible: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until the condition holds, for as long as pytest-timeout lets the test go on.

    Args:
        awaited: what is waited for, such as the log of a program that is to say it; added to what interrupts the wait.
        possible: False once it can no longer come, such as after the end of the program.

    Raises:
        AssertionError: it is no longer possible, and has not come.
    """

    thread = threading.current_thread()

    def describe() -> str:
        return f"while it was waited for: {awaited() if callable(awaited) else awaited or condition}"

    try:
        while True:
            before = time.thread_time()
            can_come = possible()  # asked first: what came just before it ended has come
            if condition():
                return
            assert can_come, f"it cannot come any more, {describe()}"
            if isinstance(thread, _Companion) and thread.given_up.is_set():
                raise _GivenUp(describe())
            time.sleep(min(max(POLL_S, 9 * (time.thread_time() - before)), LONGEST_POLL_S))
    except BaseException as interruption:
        if not isinstance(interruption, AssertionError):
            interruption.add_note(describe())
        raise


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Run `act` in a thread beside the block; what it still waits for at the end of the block is given up.

    Raises what `act` raised, at once: a block of the main thread is interrupted, for it may wait for what `act` does.
    """
    thread = _Companion(act)
    try:
        thread.start()
        try:
            yield
        finally:
            thread.end()
    except BaseException as interruption:
        if thread.error is None:
            raise
        raise thread.error from interruption
    if thread.error is not None:
        raise thread.error


class _GivenUp(Exception):
    """The test goes on without what was waited for."""


class _Companion(threading.Thread):
    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.given_up = threading.Event()
        self.error: BaseException | None = None
        self._act = act
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._ending = threading.Lock()

    def run(self) -> None:
        try:
            self._act()
        except _GivenUp:
            pass
        except BaseException as error:
            self.error = error
            with self._ending:
                if self._interrupts and not self.given_up.is_set():
                    _thread.interrupt_main()

    def end(self) -> None:
        with self._ending:  # from here on nothing is interrupted
            self.given_up.set()
        self.join()


@dataclass
class StepClock:
    """A clock for limits of the product: each look at it takes `step` seconds, however long it takes."""

    now: float = 100.0
    step: float = 0.02

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def find_now(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder in which others are at work; where one vanishes meanwhile, all are looked for again."""
    while True:
        try:
            return list(folder.glob(pattern))
        except FileNotFoundError:
            time.sleep(POLL_S)


def growing_limits(first: float) -> Iterator[float]:
    """Limits for what is to be cut short once it has begun: a test takes the first one in which it had begun."""
    while first < HANG_S:
        yield first
        first *= 8


def wait_for(find: Callable[[], T | None], awaited: str | Callable[[], str] = "") -> T:
    """Return the first value found that is not None, waited for as by `wait_until`."""
    found: list[T] = []

    def look() -> bool:
        value = find()
        found.extend([] if value is None else [value])
        return bool(found)

    wait_until(look, awaited or str(find))
    return found[0]
