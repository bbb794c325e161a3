"""No process outlives its parent, on Linux by the kernel's word and elsewhere by looking."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest
from processes import wait_until_ended
from waiting import wait_until

from draftworks.distributed import stop_signals

WAYS = {
    "kernel": "die_with_parent()",
    "watching": "threading.Thread(target=watch_parent, args=(os.getppid(),)).start()",
}
CHILD = "import os, threading, time; from draftworks.distributed.stop_signals import *; {}; print('on', flush=True); time.sleep(60)"
PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(p.pid, flush=True); p.wait()"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
@pytest.mark.parametrize("way", WAYS)
def test_child_dies_when_its_parent_is_killed(way: str) -> None:
    command = [sys.executable, "-c", PARENT, CHILD.format(WAYS[way])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "on\n"
        parent.kill()
        wait_until_ended(child)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_child_whose_parent_is_gone_already_dies_at_once() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD.format("die_with_parent(parent=1)")], check=False)
    assert child.returncode == -signal.SIGKILL


def test_shim_becomes_the_command() -> None:
    shim = [sys.executable, "-I", "-S", stop_signals.__file__, str(psutil.Process().pid)]
    done = subprocess.run([*shim, "echo", "a b", "c"], capture_output=True, text=True, check=True)
    assert done.stdout == "a b c\n"


DEAF_PARENT = (
    "import os, signal, subprocess, sys\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "p = subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()), 'sleep', '60'])\n"
    "print(p.pid, flush=True); p.wait()"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_a_command_dies_with_a_parent_that_ignores_and_blocks_the_signal() -> None:
    command = [sys.executable, "-c", DEAF_PARENT, stop_signals.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: child.name() == "sleep", "the command")
        parent.kill()
        wait_until_ended(child)
