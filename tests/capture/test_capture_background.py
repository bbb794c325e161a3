"""Background work returns its result or raises its error, and does not block the exit of the program."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from waiting import HANG_S, wait_until

from draftworks.capture.background import BackgroundWorker, TransformedFuture, await_result, run_in_background
from draftworks.errors import EngineError


def test_its_result_and_its_error_come_back():
    assert run_in_background(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        run_in_background(divmod, 7, 0).result()


def test_a_program_ends_while_it_still_waits():
    waits = "import threading\nfrom draftworks.capture.background import run_in_background\n"
    waits += (
        "begun = threading.Event()\nrun_in_background(lambda: (begun.set(), threading.Event().wait()))\nbegun.wait()"
    )
    assert subprocess.run([sys.executable, "-c", waits], check=False).returncode == 0


def test_a_worker_does_one_thing_after_another_and_begins_again_when_it_was_idle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftworks.capture.background._IDLE_S", 0.01)
    worker, threads = BackgroundWorker(), set()

    def work(number: int) -> int:
        threads.add(threading.current_thread())
        return number * number

    for _ in range(2):
        futures = [worker.submit(lambda number=number: work(number)) for number in range(20)]
        assert [await_result(each) for each in futures] == [number * number for number in range(20)]
        wait_until(lambda: not any(thread.is_alive() for thread in threads), "the end of an idle thread")
    failed = worker.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await_result(failed)
    assert worker.submit(lambda: "after it").result() == "after it"


def test_what_is_cancelled_is_interrupted_or_never_begun_and_the_rest_is_done():
    worker, begun, ended = BackgroundWorker(), threading.Event(), threading.Event()

    def run_for_ever() -> None:
        begun.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    running, waiting, wanted = (worker.submit(each) for each in (run_for_ever, lambda: None, lambda: "wanted"))
    assert begun.wait(HANG_S)
    worker.cancel([running, waiting])
    assert ended.is_set()
    assert waiting.cancelled()
    with pytest.raises(EngineError, match="was cancelled"):
        running.result()
    assert wanted.result() == "wanted"
    worker.cancel([wanted])
    assert worker.submit(lambda: "again").result() == "again"


def test_cancelling_what_is_done_interrupts_nothing_that_its_thread_does_next():
    worker, gate, done, released = BackgroundWorker(), threading.Event(), threading.Event(), threading.Event()
    followed: list[str] = []

    def follow(future: object) -> None:
        done.set()
        while not released.is_set():
            time.sleep(0.001)
        followed.append("to the end")

    future = worker.submit(lambda: gate.wait())
    future.add_done_callback(follow)
    gate.set()
    assert done.wait()
    worker.cancel([future])
    released.set()
    assert worker.submit(lambda: "next").result() == "next"
    assert followed == ["to the end"]


def test_a_transformed_result_or_error_comes_back():
    assert TransformedFuture(run_in_background(divmod, 7, 2), sum).result() == 4
    with pytest.raises(ZeroDivisionError):
        TransformedFuture(run_in_background(divmod, 7, 0), sum).result()
    with pytest.raises(TypeError):
        TransformedFuture(run_in_background(int), sum).result()
