"""No process outlives its parent, on Linux by the kernel's word and elsewhere by looking."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from draftworks import parent_death

WAYS = {
    "kernel": "die_with_parent()",
    "watching": "threading.Thread(target=watch_parent, args=(os.getppid(),)).start()",
    "parent_gone_before": "die_with_parent(parent=1)",
}
CHILD = "import os, threading, time; from draftworks.parent_death import *; {}; print('on', flush=True); time.sleep(60)"
PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(p.pid, flush=True); p.wait()"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
@pytest.mark.parametrize("way", WAYS)
def test_child_dies_when_its_parent_is_killed(way: str) -> None:
    command = [sys.executable, "-c", PARENT, CHILD.format(WAYS[way])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if way != "parent_gone_before":
            assert parent.stdout.readline() == "on\n"
            parent.kill()
        gone_by = time.monotonic() + 3
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < gone_by:
            time.sleep(0.02)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_shim_becomes_the_command() -> None:
    shim = [sys.executable, "-I", "-S", parent_death.__file__, str(psutil.Process().pid)]
    done = subprocess.run([*shim, "echo", "a b", "c"], capture_output=True, text=True, check=True)
    assert done.stdout == "a b c\n"
