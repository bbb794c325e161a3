"""The frame of launched programs, started by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from frame_program import FrameRun
from processes import ending, kill_all, wait_until_ended
from waiting import wait_until

from draftworks.config.run_files import COPY_VARIABLE, CaptureRun, ExportRun, TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.programs.failure import LESS_MEMORY, RankFailure
from draftworks.programs.program import ProgramContext, _run

PYTHON = (sys.executable, "-m")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


@contextmanager
def started(
    run: dict, tmp_path: Path, launcher: tuple[str, ...] = PYTHON, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """A program that is ended with all of its session, whatever the test comes to."""
    (tmp_path / "out").mkdir()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"out": "out", **run}))
    process = subprocess.Popen(
        [*launcher, "frame_program", str(tmp_path / "run.yaml")],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with ending(process):
        yield process


def wait_for_file(program: subprocess.Popen[str], file: Path) -> None:
    wait_until(file.exists, str(file), possible=lambda: program.poll() is None)


def test_runs_by_hand_without_torchrun_and_prints_its_report(tmp_path: Path) -> None:
    with started({"task": "sum"}, tmp_path) as program:
        out, err = program.communicate()
    log, _, report = out.partition("\n")
    assert log == "task sum", err
    assert json.loads(report) == {"sum": 0, "ranks": 1, "out": str(tmp_path / "out")}


def test_runs_by_hand_under_torchrun_in_a_process_group(tmp_path: Path) -> None:
    with started({"task": "sum", "ranks": 2}, tmp_path, TORCHRUN) as torchrun:
        out, err = torchrun.communicate()
    assert "[rank 0] task sum" in out, err
    assert "[rank 1] task sum" in out
    assert '"sum": 1' in out
    assert out.count('"ranks": 2') == 1, "one report, of rank 0"


def test_user_error_prints_its_message_alone(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    with started({"task": "user_error"}, tmp_path, TORCHELASTIC_ERROR_FILE=str(error_file)) as program:
        _, err = program.communicate()
    assert program.returncode == 2
    assert err == "error: taps: expected at most 8, found 9. Use fewer.\n"
    failure = RankFailure.read(error_file)
    assert failure is not None
    assert failure.user_error
    assert failure.message == "taps: expected at most 8, found 9. Use fewer."


def test_bad_run_file_is_a_user_error(tmp_path: Path) -> None:
    with started({"task": "sum", "rank": 2}, tmp_path) as program:
        _, err = program.communicate()
    assert program.returncode == 2
    assert "run.yaml" in err
    assert "rank" in err
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="a disk that is always full is Linux's")
def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{{out: {tmp_path}, task: save}}")

    def save(run: FrameRun, ctx: ProgramContext) -> dict:
        with open("/dev/full", "w") as stream:
            stream.write("x")
        return {}

    with pytest.raises(StoreError, match=r"^/dev/full: the disk is full|the disk is full.*are free in"):
        _run(FrameRun, save, tmp_path / "run.yaml")


def test_crash_prints_its_traceback(tmp_path: Path) -> None:
    with started({"task": "crash"}, tmp_path) as program:
        _, err = program.communicate()
    assert program.returncode == 1
    assert "Traceback" in err
    assert "RuntimeError: a ghost in the machine" in err


def test_sigterm_interrupts_and_lets_the_program_save(tmp_path: Path) -> None:
    with started({"task": "wait"}, tmp_path) as program:
        wait_for_file(program, tmp_path / "out" / "ready-0")
        program.send_signal(signal.SIGTERM)
        _, err = program.communicate()
    assert program.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "out" / "saved-0").exists()
    assert err == "interrupted by SIGTERM\n"


@dataclass(frozen=True)
class Ranks:
    """A torchrun whose ranks are at work."""

    torchrun: subprocess.Popen[str]
    ranks: list[psutil.Process]


@contextmanager
def started_ranks(task: str, tmp_path: Path, **env: str) -> Iterator[Ranks]:
    with started({"task": task}, tmp_path, TORCHRUN, **env) as torchrun:
        for rank in (0, 1):
            wait_for_file(torchrun, tmp_path / "out" / f"ready-{rank}")
        ranks = psutil.Process(torchrun.pid).children(recursive=True)
        assert len(ranks) >= 2
        try:
            yield Ranks(torchrun, ranks)
        finally:
            kill_all(ranks)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_repeated_signals_to_every_process_let_all_ranks_save(first: signal.Signals, tmp_path: Path) -> None:
    """As Slurm and terminals do it; the last one, to torchrun alone, is a launcher's."""
    with started_ranks("wait", tmp_path) as job:
        for signum in (first, signal.SIGTERM):
            for process in (psutil.Process(job.torchrun.pid), *job.ranks):
                process.send_signal(signum)
        job.torchrun.terminate()
        _, err = job.torchrun.communicate()
        wait_until_ended(*job.ranks)
    assert (tmp_path / "out" / "saved-0").exists(), err
    assert (tmp_path / "out" / "saved-1").exists(), err


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
@pytest.mark.usefixtures("real_starts")
def test_ranks_save_and_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    with started_ranks("wait", tmp_path) as job:
        job.torchrun.kill()
        job.torchrun.communicate()
        wait_until_ended(*job.ranks)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"saved-0", "saved-1"}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_ranks_that_do_not_stop_die_some_time_after_torchrun(tmp_path: Path) -> None:
    with started_ranks("stuck", tmp_path, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1") as job:
        job.torchrun.kill()
        job.torchrun.communicate()
        wait_until_ended(*job.ranks)


def test_progress_is_limited_and_from_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    main, other = ProgramContext(), ProgramContext(rank=1, world_size=2)
    for step in range(1000):
        main.report_progress({"step": step, "loss": 1.23456789})
        other.report_progress({"step": step})
    assert capsys.readouterr().out == "step=0 loss=1.235\n"


def test_forced_progress_is_never_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main, other = ProgramContext(), ProgramContext(rank=1, world_size=2)
    main.report_progress({"step": 1})
    for context in (main, other):
        context.report_progress({"heldout": 2}, force=True)
        context.report_progress({"step": 3}, force=True)
    main.report_progress({"step": 4})
    assert capsys.readouterr().out == "step=1\nheldout=2\nstep=3\n"


def test_memory_that_ran_out_says_what_needs_less():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60)
    assert RankFailure.of(caught.value, rank=0).message.endswith(LESS_MEMORY)
    assert LESS_MEMORY not in RankFailure.of(ValueError("x"), rank=0).message


def test_error_file_keeps_what_was_written_and_reads_torchelastics_own(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    failure = RankFailure.of(ConfigError("no"), rank=3)
    path.write_text(json.dumps(failure.to_json()))
    assert RankFailure.read(path) == failure
    extra = {"py_callstack": "Traceback", "timestamp": "12"}
    path.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    assert RankFailure.read(path) == RankFailure("ValueError: x", "Traceback", time_ns=12_000_000_000)


@pytest.mark.parametrize("text", ["", '{"message": {"mess', "{}", "[]", '{"message": {}}'])
def test_error_file_cut_short_is_no_failure(text: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(text)
    assert RankFailure.read(tmp_path / "error.json") is None


def test_no_program_begins_on_another_target_than_its_run_file_says(tmp_path: Path, tiny_target: TargetFiles) -> None:
    began = []
    for digest in (tiny_target.digest, "of nobody"):
        run = ExportRun(out=tmp_path, target=tiny_target.model_copy(update={"digest": digest}), draft=tmp_path)
        run.save(tmp_path / f"{digest}.yaml")
    _run(ExportRun, lambda run, ctx: began.append(run.target.digest) or {}, tmp_path / f"{tiny_target.digest}.yaml")
    with pytest.raises(ConfigError, match="target tiny: weights and config.json in .*expected digest of nobody, found"):
        _run(ExportRun, lambda run, ctx: began.append(run.target.digest) or {}, tmp_path / "of nobody.yaml")
    assert began == [tiny_target.digest]


def test_each_copy_of_a_job_is_a_worker_with_an_output_of_its_own(
    tmp_path: Path, tiny_target: TargetFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []
    run = CaptureRun(
        out=tmp_path / "out", target=tiny_target, tokens=tmp_path, taps=[2], capture={}, store=tmp_path, worker=1
    )
    path = run.save(tmp_path / "run.yaml")
    for copy in (None, "0", "3"):
        if copy is not None:
            monkeypatch.setenv(COPY_VARIABLE, copy)
        _run(CaptureRun, lambda run, ctx: began.append((run.worker, run.out)) or {}, path)
    out = tmp_path / "out"
    assert began == [(1, out), (1, out / "1"), (4, out / "4")]
