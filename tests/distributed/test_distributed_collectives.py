"""Sums and largest values of all ranks: on one rank they are those of the rank, in the same types as on several.
Where a rank computes.
Every rank does what the greatest verdict says.
Work that does not end is ended; work that waits or is done in time is not.
No process outlives its parent, on Linux by the kernel's word and elsewhere by looking.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from processes import wait_until_ended
from waiting import wait_until

from draftworks.data.target_files import CpuTimeExceeded, limit_cpu_time
from draftworks.distributed import stop_signals
from draftworks.distributed.collectives import (
    Decision,
    Verdict,
    agree,
    find_interface,
    gather_from_ranks,
    max_over_ranks,
    open_process_group,
    resolve_device,
    sum_over_ranks,
)
from draftworks.errors import ConfigError, StoreError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_sums_are_taken_in_float64_so_that_they_do_not_depend_on_the_ranks(dtype: torch.dtype):
    values = torch.tensor([[1, 2], [3, 4]]).to(dtype)
    total = sum_over_ranks(values)
    assert total.dtype == torch.float64
    assert total.tolist() == [[1, 2], [3, 4]]


def test_a_sum_leaves_what_is_summed_as_it_was():
    values = torch.ones(3, dtype=torch.float64)
    sum_over_ranks(values).add_(1)
    assert values.tolist() == [1, 1, 1]


def test_without_a_process_group_one_rank_stands_for_all():
    assert max_over_ranks(3) == 3
    assert gather_from_ranks({"a": 1}) == [{"a": 1}]


def test_single_process_needs_no_group() -> None:
    with open_process_group("cpu") as device:
        assert device == torch.device("cpu")
        assert not dist.is_initialized()


def test_auto_is_a_gpu_where_there_is_one() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_missing_gpu_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "99")
    with pytest.raises(ConfigError, match="process 99 finds . GPU"):
        resolve_device("cuda")


def test_the_interface_is_the_one_that_leads_to_the_first_rank() -> None:
    assert find_interface("127.0.0.1") in ("lo", "lo0")
    assert find_interface("no-such-host.invalid") is None


def test_a_single_rank_decides_alone():
    for verdict in (Verdict.GO, Verdict.WAIT, Verdict.END):
        assert agree(Decision(verdict)) == Decision(verdict)
    assert agree(Decision(Verdict.STOP, 15)) == Decision(Verdict.STOP, 15)
    with pytest.raises(ConfigError, match="wrong"):
        agree(Decision(Verdict.FAIL), ConfigError("wrong"))


def test_two_ranks_decide_alike(tmp_path: Path):
    on_ranks(2, tmp_path, _decide)


def _decide(rank: int) -> None:
    group = dist.new_group(backend="gloo")
    for first in list(Verdict)[:4]:
        for second in list(Verdict)[:4]:
            verdict = (first, second)[rank]
            found = agree(Decision(verdict, 15 if verdict is Verdict.STOP else 0), group=group)
            assert found == Decision(max(first, second), 15 if Verdict.STOP in (first, second) else 0)
    for failing, error in ((0, StoreError("no disk")), (1, OSError("no disk"))):
        own = failing == rank
        with pytest.raises((StoreError, OSError)) as caught:
            agree(Decision(Verdict.FAIL if own else Verdict.STOP, 0 if own else 15), error if own else None)
        if own:
            assert caught.value is error
        else:
            assert str(caught.value) == f"rank {failing}: {'no disk' if failing == 0 else 'OSError: no disk'}"
    assert agree(Decision(Verdict.GO)) == Decision(Verdict.GO)


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
