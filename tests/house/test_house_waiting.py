"""Waiting of tests: it ends when something has come, can no longer come, or when pytest-timeout says so, and then tells for what."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from processes import ending, lives
from waiting import meanwhile, wait_for, wait_until

pytest_plugins = ["pytester"]
TOYS = Path(__file__).resolve().parents[1] / "toys"


def test_it_waits_until_the_condition_holds_and_no_longer():
    answers = iter([0, "", "it is so", pytest.fail])
    wait_until(lambda: next(answers))
    assert next(answers) is pytest.fail


def test_it_returns_the_first_value_that_is_found():
    answers: Iterator[int | None] = iter([None, None, 0, 1])
    assert wait_for(lambda: next(answers)) == 0


def test_what_can_no_longer_come_is_not_waited_for():
    with pytest.raises(AssertionError, match="cannot come any more, while it was waited for: the sign of the program"):
        wait_until(lambda: False, "the sign of the program", possible=lambda: False)


def test_what_came_just_before_the_program_ended_has_come():
    has_come = threading.Event()

    def end() -> bool:
        has_come.set()
        return False

    wait_until(has_come.is_set, possible=end)


def test_an_error_of_the_condition_passes_with_what_was_waited_for():
    with pytest.raises(KeyError) as caught:
        wait_until(lambda: {}["nothing"], lambda: "the log says: no")
    assert caught.value.__notes__ == ["while it was waited for: the log says: no"]


def test_what_a_thread_waits_for_is_given_up_when_the_test_is_done_with_it():
    done = []

    def wait() -> None:
        try:
            wait_until(lambda: False)
        finally:
            done.append("left")

    with meanwhile(wait):
        pass
    assert done == ["left"]


def test_what_a_thread_raises_fails_the_test_that_has_started_it():
    def fail() -> None:
        assert not "a ghost"

    with pytest.raises(AssertionError, match="a ghost"), meanwhile(fail):
        pass
    with pytest.raises(ZeroDivisionError), meanwhile(lambda: None):
        raise ZeroDivisionError


def test_of_a_block_and_its_thread_that_both_fail_both_are_told():
    tried = threading.Event()

    def fail() -> None:
        tried.wait()
        assert not "a ghost"

    with pytest.raises(AssertionError, match="a ghost") as both, meanwhile(fail), ending_with(tried):
        raise ZeroDivisionError
    assert isinstance(both.value.__cause__, ZeroDivisionError | KeyboardInterrupt)


@contextmanager
def ending_with(event: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        event.set()


def test_a_test_that_waits_for_what_its_thread_does_fails_once_the_thread_has_failed():
    def fail() -> None:
        assert not "a ghost"

    with pytest.raises(AssertionError, match="a ghost"), meanwhile(fail):
        wait_until(lambda: False, "what the thread does")


def test_a_timeout_ends_the_wait_tells_what_for_and_runs_what_is_to_run_finally(pytester: pytest.Pytester):
    pytester.makepyfile(
        "from waiting import wait_until\n"
        "def test_waits():\n"
        "    try:\n"
        "        wait_until(lambda: False, 'a second ghost')\n"
        "    finally:\n"
        "        open('ended', 'w')\n"
    )
    pytester.makeini(f"[pytest]\npythonpath = {TOYS}\ntimeout = 1\ntimeout_method = signal\n")
    outcome = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines(["*Timeout (>1.0s)*", "*while it was waited for: a second ghost*"])
    assert (pytester.path / "ended").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are looked for in /proc")
@pytest.mark.parametrize("first", ["sleep 1000", "exit 0"], ids=["it lives", "it has ended"])
def test_a_process_is_ended_with_all_below_it_and_its_orphans_whatever_happens(first: str):
    command = ["sh", "-c", f"sleep 1000 & echo $!; {first}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with suppress(ZeroDivisionError), ending(process):
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        if first == "exit 0":
            process.wait()
        raise ZeroDivisionError
    assert process.returncode == (0 if first == "exit 0" else -signal.SIGKILL)
    assert not lives(child)
