"""Work that does not end is ended; work that waits or is done in time is not."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest

from draftworks.data.tokenizer_files import CpuTimeExceeded, limit_cpu_time


def spin() -> None:
    while True:
        with suppress(Exception):  # as foreign code does
            pass


def test_endless_work_is_ended_and_its_handler_put_back():
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(CpuTimeExceeded), limit_cpu_time(0.05):
        spin()
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_waiting_and_work_that_is_done_in_time_are_left_alone():
    with limit_cpu_time(0.5):
        time.sleep(0.6)


def test_outside_the_main_thread_nothing_is_bounded():
    seen = []

    def work() -> None:
        with limit_cpu_time(0.01):
            seen.append(signal.getitimer(signal.ITIMER_VIRTUAL)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]
