"""What a Ray job runs: its file, torchrun on one of several nodes, and when a node counts as lost."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import ending
from waiting import HANG_S, wait_for, wait_until

from draftworks.programs.ray_job import (
    EXIT_LOST,
    EXIT_STOPPED,
    NODE_OPTIONS,
    OUT_OF_TIME,
    Node,
    RayJob,
    count_nodes,
    main,
    run_on_node,
    wait_for_nodes,
)

FIRST = Node(rank=0, count=2, meeting="10.0.0.1:4000", address="10.0.0.1")


def make_job(folder: Path, code: str = "", **changes) -> RayJob:
    job = RayJob(
        command=(sys.executable, "-c", code),
        env={"SECRET": "only here"},
        folder=str(folder),
        log=str(folder / "out.log"),
        cwd=str(folder),
        nodes=2,
        least_nodes=2,
        resources={"CPU": 2.0},
        grace_s=1.0,
        start_timeout_s=HANG_S,
    )
    return replace(job, **changes)


def run_in_background(job: RayJob) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_on_node(job, FIRST, os.getpid())), daemon=True)
    thread.start()
    return thread, codes


def test_a_job_is_read_back_from_a_file_that_only_its_user_reads(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.save(tmp_path / "job.json")
    assert RayJob.load(tmp_path / "job.json") == job
    assert stat.S_IMODE((tmp_path / "job.json").stat().st_mode) == 0o600


def test_torchrun_gets_its_node_s_place_and_no_rank_of_ray_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    filled = FIRST.fill_in(["python", "@NODES@", *NODE_OPTIONS])
    assert filled[:2] == ["python", "@NODES@"], "arguments of the program are left alone"
    assert filled[2:] == [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.1:4000",
        "--rdzv-conf=is_host=true",
        "--nnodes=2",
        "--local-addr=10.0.0.1",
    ]
    assert "--rdzv-conf=is_host=false" in replace(FIRST, rank=1).fill_in(NODE_OPTIONS)
    environment = make_job(tmp_path).make_environment()
    assert "RANK" not in environment
    assert environment["SECRET"] == "only here"


@pytest.mark.parametrize("code", [0, 3])
def test_a_node_answers_with_the_code_of_torchrun(tmp_path: Path, code: int) -> None:
    job = make_job(tmp_path, f"raise SystemExit({code})")
    assert run_on_node(job, FIRST, os.getpid()) == code
    assert job.locate_code(0).read_text() == str(code)
    assert wait_for_nodes(make_job(tmp_path), 0)


def test_a_stop_terminates_torchrun_and_is_no_failure_of_the_node(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved').touch(), sys.exit(1)))\n"
        "pathlib.Path('began').touch(); time.sleep(2000)"
    )
    job = make_job(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    thread, codes = run_in_background(job)
    wait_until((tmp_path / "began").exists)
    assert not wait_for_nodes(job, 0), "a node that runs is no node that has ended"
    job.stop_file.touch()
    thread.join()
    assert codes == [0]
    assert (tmp_path / "saved").exists()
    assert wait_for_nodes(job, 0)


def test_torchrun_that_does_not_end_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftworks.programs.ray_job.MARGIN_S", 0.0)
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(tmp_path / 'began')!r}, 'w'); time.sleep(2000)"
    job = make_job(tmp_path, code, grace_s=0.3)
    thread, codes = run_in_background(job)
    wait_until((tmp_path / "began").exists)
    job.stop_file.touch()
    thread.join()
    assert codes == [0]


def test_torchrun_ends_when_the_worker_of_ray_has_been_killed(tmp_path: Path) -> None:
    """Ray kills a worker and all that are below it, so the process that runs torchrun is not."""
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(2000)"
    make_job(tmp_path, code).save(tmp_path / "job.json")
    node = [
        sys.executable,
        "-m",
        "draftworks.programs.ray_job",
        str(tmp_path / "job.json"),
        "--node",
        *["0", "2", "a:1", "a"],
    ]
    worker = f"import os, subprocess, time; subprocess.run({node!r} + [str(os.getpid())]); time.sleep(2000)"
    with ending(subprocess.Popen([sys.executable, "-c", worker])) as process:
        pid = wait_for(lambda: read_pid(tmp_path / "pid"), "the program of torchrun")
        wait_until(lambda: not psutil.Process(process.pid).children(), "that what started torchrun's process has ended")
        process.kill()
    assert wait_for_nodes(make_job(tmp_path), HANG_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def read_pid(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() and path.stat().st_size else None


@contextmanager
def running_as_a_job(job: RayJob, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job that is ended with all below it, whatever the test comes to."""
    job.save(folder / "job.json")
    process = subprocess.Popen([sys.executable, "-m", "draftworks.programs.ray_job", str(folder / "job.json")])
    with ending(process):
        yield process


def test_a_signal_is_not_sent_to_torchrun_a_second_time(tmp_path: Path) -> None:
    """Ray terminates the job's process and all below it."""
    code = (
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path('asked').open('a').write('x'))\n"
        "pathlib.Path('began').touch()\n"
        "while not pathlib.Path('asked').exists(): time.sleep(0.05)\n"
        "time.sleep(1)"
    )
    with running_as_a_job(make_job(tmp_path, code, nodes=1, grace_s=HANG_S), tmp_path) as process:
        wait_until((tmp_path / "began").exists, "the program", possible=lambda: process.poll() is None)
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            each.terminate()
        assert process.wait() == 0
    assert (tmp_path / "asked").read_text() == "x"


def test_the_time_limit_ends_a_job_that_may_go_on(tmp_path: Path) -> None:
    """However long its program takes to start: it is not asked for anything here."""
    job = make_job(tmp_path, "import time; time.sleep(2000)", nodes=1, time_limit_s=1.0)
    with running_as_a_job(job, tmp_path) as process:
        assert process.wait() == EXIT_LOST
    assert "time limit of 1 s" in (tmp_path / "out.log").read_text()


def test_the_ranks_of_a_job_out_of_time_are_asked_to_stop(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved').touch(), sys.exit(1)))\n"
        "pathlib.Path('began').touch()\n"
        "time.sleep(2000)"
    )
    job = make_job(tmp_path, code, nodes=1, grace_s=HANG_S)
    with running_as_a_job(job, tmp_path) as process:
        wait_until((tmp_path / "began").exists, "the program", possible=lambda: process.poll() is None)
        job.ask_to_stop(OUT_OF_TIME)
        assert process.wait() == EXIT_LOST
    assert (tmp_path / "saved").exists()


def test_a_job_that_was_ended_while_it_waited_runs_nothing(tmp_path: Path) -> None:
    job = make_job(tmp_path, "open('began', 'w')", nodes=1)
    job.ask_to_stop("stopped")
    with running_as_a_job(job, tmp_path) as process:
        assert process.wait() == EXIT_STOPPED
    assert not (tmp_path / "began").exists()


def test_a_node_without_the_shared_file_system_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "elsewhere" / "job.json")]) == 2
    assert "needs the file system of `var`" in capsys.readouterr().err


def make_nodes(cpus: Sequence[int]) -> list[dict]:
    return [{"Alive": count > 0, "Resources": {"CPU": abs(float(count))}} for count in cpus]


@pytest.mark.parametrize(
    ("cpus", "least", "expected"),
    [((2, 2, 2), 1, 2), ((2, 1), 1, 1), ((2, -2), 1, 1), ((1,), 1, 1), ((2,), 2, 2)],
    ids=["all are there", "one is too small", "one is dead", "fewest all the same", "no fewer than wanted"],
)
def test_a_job_begins_with_the_nodes_that_are_there(tmp_path: Path, cpus, least: int, expected: int) -> None:
    assert count_nodes(make_job(tmp_path, least_nodes=least), make_nodes(cpus)) == expected


def test_what_the_program_prints_goes_to_the_job_s_log(tmp_path: Path) -> None:
    make_job(tmp_path, "import os; print(os.environ['SECRET'], os.getcwd())", nodes=1).save(tmp_path / "job.json")
    command = [sys.executable, "-m", "draftworks.programs.ray_job", str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "out.log").read_text() == f"only here {tmp_path}\n"
    assert json.loads((tmp_path / "job.json").read_text())["nodes"] == 1
