"""Waiting of tests, without a deadline: how long something takes is the machine's load, so only pytest-timeout ends a wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.02
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

    def describe() -> str:
        return f"while it was waited for: {awaited() if callable(awaited) else awaited or condition}"

    try:
        while True:
            can_come = possible()  # asked first: what came just before it ended has come
            if condition():
                return
            assert can_come, f"it cannot come any more, {describe()}"
            time.sleep(POLL_S)
    except BaseException as interruption:
        if not isinstance(interruption, AssertionError):
            interruption.add_note(describe())
        raise


def wait_for(find: Callable[[], T | None], awaited: str | Callable[[], str] = "") -> T:
    """Return the first value found that is not None, waited for as by `wait_until`."""
    found: list[T] = []

    def look() -> bool:
        value = find()
        found.extend([] if value is None else [value])
        return bool(found)

    wait_until(look, awaited or str(find))
    return found[0]
