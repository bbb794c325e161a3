"""A program that starts warm (toys/warm_starts) is for its parent, itself and the system as one that was executed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_starts

from draftworks.distributed.stop_signals import build_shim_command
from resources.torch_job import ONE_NODE_ENV

PROGRAM = str(Path(__file__).with_name("asked_program.py"))
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=["real", "warm"])
def begin(request: pytest.FixtureRequest) -> Iterator[Begin]:
    """Starts the program with an action."""
    set_up = {"real": warm_starts.uninstall, "warm": warm_starts.install}[request.param]
    set_up()
    started: list[subprocess.Popen[str]] = []

    def start(action: str, before: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENV, **options}
        started.append(subprocess.Popen([*before, sys.executable, PROGRAM, action, "after it"], text=True, **options))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()
    warm_starts.install_unless_unwanted()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.parametrize("launched", [False, True])
def test_only_a_warm_start_has_the_imports(begin: Begin, request: pytest.FixtureRequest, launched: bool):
    waiting = begin("wait", build_shim_command() if launched else ())
    assert waiting.stdout is not None
    waiting.stdout.readline()
    assert has_torch(psutil.Process(waiting.pid)) == (request.node.callspec.params["begin"] == "warm")


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in each.path for each in process.memory_maps())


@pytest.mark.parametrize(
    ("action", "code"), [("tell", 0), ("exit", 3), ("refuse", 1), ("fail", 1), ("interrupt", -signal.SIGINT)]
)
def test_the_exit_code_is_that_of_python(begin: Begin, action: str, code: int):
    process = begin(action)
    _, err = process.communicate()
    assert process.returncode == code
    last = {"refuse": "refused", "fail": "ZeroDivisionError: division by zero", "interrupt": "KeyboardInterrupt"}.get(
        action, ""
    )
    assert err.strip().endswith(last)
    assert (PROGRAM in err) == (action in ("fail", "interrupt")), "the traceback begins in the program"


def test_it_is_the_child_of_who_starts_it_and_alone_in_the_group_it_was_given(begin: Begin):
    plain, session, group = (
        told(begin("tell")),
        told(begin("tell", start_new_session=True)),
        told(begin("tell", process_group=0)),
    )
    assert {each["parent"] for each in (plain, session, group)} == {os.getpid()}
    assert (plain["session"], plain["group"]) == (os.getsid(0), os.getpgid(0))
    assert (session["session"], session["group"]) == (session["pid"], session["pid"])
    assert (group["session"], group["group"]) == (os.getsid(0), group["pid"])


def test_a_signal_ends_it_and_it_stays_a_zombie_until_it_is_waited_for(begin: Begin):
    waiting = begin("wait")
    assert waiting.stdout is not None
    waiting.stdout.readline()
    waiting.terminate()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(waiting.pid).status() == psutil.STATUS_ZOMBIE
    assert waiting.wait() == -signal.SIGTERM
    assert not psutil.pid_exists(waiting.pid)


def test_signals_are_handled_as_after_execve(begin: Begin):
    old = signal.signal(signal.SIGTERM, lambda *_: None), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        given = told(begin("tell"))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        signal.signal(signal.SIGTERM, old[0])
        signal.signal(signal.SIGUSR1, old[1])
    assert given["blocked"] == [signal.SIGUSR2]
    assert given["signals"]["SIGTERM"] == str(signal.SIG_DFL), "a handler is not inherited"
    assert given["signals"]["SIGUSR1"] == str(signal.SIG_IGN), "what is ignored stays so"
    assert given["signals"]["SIGPIPE"] == str(signal.SIG_IGN)
    assert "default_int_handler" in given["signals"]["SIGINT"]


def test_it_has_the_descriptors_that_it_was_passed_and_no_others(begin: Begin):
    inherited, passed = os.pipe()
    os.set_inheritable(inherited, True)
    try:
        given = told(begin("tell", pass_fds=[passed]))
    finally:
        os.close(inherited)
        os.close(passed)
    assert given["descriptors"] == [0, 1, 2, passed]


def test_it_has_the_environment_it_was_given_also_for_others(begin: Begin):
    env = {**ENV, "OF_THIS_TEST": "a b=c"}
    given = told(begin("tell", env=env))
    assert given["env"] == env
    assert given["shown_env"] == sorted(f"{name}={value}" for name, value in env.items())


def test_it_has_the_folder_mask_and_limits_of_its_parent(begin: Begin, tmp_path: Path):
    given = told(begin("tell", cwd=tmp_path, umask=0o27))
    assert given["cwd"] == str(tmp_path)
    assert given["umask"] == 0o27
    plain = told(begin("tell"))
    assert plain["cwd"] == os.getcwd()
    assert tuple(plain["files"]) == psutil.Process().rlimit(psutil.RLIMIT_NOFILE)


def test_it_reads_what_is_written_to_it_until_the_end(begin: Begin):
    out, _ = begin("echo", stdin=subprocess.PIPE).communicate("first\nsecond")
    assert out == "first\nsecond\n"


def test_its_command_line_and_name_are_its_own(begin: Begin):
    waiting = begin("wait")
    assert waiting.stdout is not None
    given = json.loads(waiting.stdout.readline())
    process = psutil.Process(waiting.pid)
    assert process.cmdline() == [sys.executable, PROGRAM, "wait", "after it"]
    assert given["argv"] == [PROGRAM, "wait", "after it"]
    assert (given["path"], given["main"]) == (str(Path(PROGRAM).parent), PROGRAM)
    assert (given["name"].strip(), given["threads"]) == (Path(sys.executable).name, 1)
    assert given["interpreter"] == os.readlink("/proc/self/exe")


def test_two_draw_different_random_numbers(begin: Begin):
    assert begin("draw").communicate()[0] != begin("draw").communicate()[0]


def test_the_ranks_of_a_torchrun_are_its_children_and_learn_of_its_death(
    begin: Begin, request: pytest.FixtureRequest, tmp_path: Path
):
    """As warm as torchrun itself, also where it was started by a worker of pytest-xdist, which is warm too."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    torchrun += [f"--rdzv-endpoint={tmp_path}/store", "--rdzv-conf=store_type=file", PROGRAM, "stay"]
    env = {**ENV, **ONE_NODE_ENV}
    with subprocess.Popen(torchrun, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        ranks = [json.loads(parent.stdout.readline()) for _ in range(2)]
        processes = [psutil.Process(rank["pid"]) for rank in ranks]
        is_warm = request.node.callspec.params["begin"] == "warm"
        assert [has_torch(process) for process in processes] == [is_warm, is_warm]
        parent.kill()
        psutil.wait_procs(processes)
    assert {rank["parent"] for rank in ranks} == {parent.pid}
    assert {rank["rank"] for rank in ranks} == {"0", "1"}
