"""The first request to stop counts; its repeats of the next moments do not; one that is made anew does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from draftworks.distributed import stop_signals
from draftworks.distributed.stop_signals import Interrupted, defer_interrupt, defer_stop, raise_on_stop

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_as_before():
    before = {signum: signal.getsignal(signum) for signum in BOTH}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(*signums: signal.Signals) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signums", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM), BOTH * 9])
def test_repeats_are_one_request(signums):
    before = [signal.getsignal(signum) for signum in BOTH]
    with defer_stop() as request:
        assert request.signum == 0
        send(*signums)
        assert request.signum == signums[0]
    assert [signal.getsignal(signum) for signum in BOTH] == before


def test_interrupted_is_raised_once_however_often_it_is_asked_for():
    raise_on_stop()
    with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
        send(signal.SIGTERM)
    send(signal.SIGTERM, signal.SIGINT)


def test_a_repeat_of_what_deferred_work_was_asked_does_not_interrupt_what_follows():
    raise_on_stop()
    with defer_stop() as request:
        send(signal.SIGTERM)
    send(signal.SIGTERM)
    with defer_stop() as again:
        assert again.signum == request.signum == signal.SIGTERM


def test_a_request_made_anew_is_passed_to_the_handler_of_before(monkeypatch):
    taken = []
    signal.signal(signal.SIGINT, lambda signum, frame: taken.append(signum))
    with defer_interrupt() as pass_on:
        pass_on()
        send(signal.SIGINT, signal.SIGINT)
        assert taken == []
        pass_on()
        assert taken == [signal.SIGINT]
        monkeypatch.setattr(stop_signals, "REPEATS_S", 0.0)
        send(signal.SIGINT)
        assert taken == [signal.SIGINT] * 2


def test_a_request_made_anew_ends_a_program_at_once():
    code = """
import os, signal
from draftworks.distributed import stop_signals
stop_signals.REPEATS_S = 0
with stop_signals.defer_stop() as request:
    os.kill(os.getpid(), signal.SIGINT)
    print("noted", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("never", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("noted\n", -signal.SIGTERM)


def test_outside_the_main_thread_nothing_is_deferred():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with defer_stop():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
