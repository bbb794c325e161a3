"""Frame of every launched program: reads the run file, sends the report, writes errors where the launcher finds them.

    def train(run: TrainRun, ctx: ProgramContext) -> dict[str, Any]: ...

    if __name__ == "__main__":
        run_program(TrainRun, train)

The same program runs in three ways: launched by Dagster, by `torchrun -m draftworks.programs.train FILE`, and by
`python -m draftworks.programs.train FILE` alone. The run file is a positional argument because torchrun would take an
option `--run` for an abbreviation of one of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from dagster_pipes import PipesContext, PipesEnvVarParamsLoader, open_dagster_pipes
from torch.distributed import is_torchelastic_launched
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from draftworks.config.run_files import COPY_VARIABLE, RunFile, SharedRun, TargetRun
from draftworks.distributed.stop_signals import Interrupted, end_with_parent, raise_on_stop
from draftworks.errors import DraftworksError
from draftworks.programs.failure import RankFailure
from draftworks.programs.heartbeat import LABEL, Heartbeat
from draftworks.programs.silence import Silence
from draftworks.storage.files import explain_full_disk
from draftworks.storage.shared_folder import check_shared_folder_of_job
from draftworks.targets.resolve import require_unchanged

EXIT_USER_ERROR = 2
_SIGNAL_EXIT_BASE = 128
_PROGRESS_INTERVAL_S = 2.0
_SHUTDOWN_TIMEOUT_S = 30.0
"""torchrun's default of --shutdown-timeout: the time that a rank has for an orderly end."""

RunType = TypeVar("RunType", bound=RunFile)


@dataclass
class ProgramContext:
    """Rank of this process, and its output: log lines, progress, the report."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    pipes: PipesContext | None = None
    heartbeat: Heartbeat | None = None
    silence: Silence | None = field(default=None, repr=False, init=False)
    _last_progress_s: float = field(default=float("-inf"), repr=False)

    @classmethod
    def from_torchrun(cls, pipes: PipesContext | None = None, heartbeat: Heartbeat | None = None) -> ProgramContext:
        """Read the ranks from torchrun's environment variables; a single process without them."""
        names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
        ranks = {key: int(os.environ[name]) for key, name in names.items() if name in os.environ}
        return cls(**ranks, pipes=pipes, heartbeat=heartbeat)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which reports and writes files that exist once."""
        return self.rank == 0

    def log(self, message: str) -> None:
        """Print a line to stdout, with the rank if there are several; rank 0's lines also go to Dagster's run page, with
        the launcher's name for the program if others run beside it."""
        self.beat(message)
        if self.silence is not None:
            self.silence.heard()
        self.print_line(message)

    def print_line(self, message: str) -> None:
        """Print a line as `log` does, which counts as no progress: a program that hangs may say that it does nothing."""
        prefix = f"[rank {self.rank}] " if self.world_size > 1 else ""
        print(f"{prefix}{message}", flush=True)
        if self.pipes is not None:
            label = self.pipes.extras.get(LABEL)
            self.pipes.log.info(message if label is None else f"{label}: {message}")

    def report_progress(self, values: Mapping[str, float | int | str], *, force: bool = False) -> None:
        """Print the progress as a line `step=10 loss=2.31`, on rank 0 and at most every two seconds.

        Args:
            force: print the line in any case.
        """
        now, line = time.monotonic(), " ".join(f"{key}={_format_value(value)}" for key, value in values.items())
        self.beat(line)
        if not self.is_main or not (force or now - self._last_progress_s >= _PROGRESS_INTERVAL_S):
            return
        self._last_progress_s = now
        self.log(line)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Name what takes long, such as "loading the target": printed at every `SILENCE_S` without another line."""
        return nullcontext() if self.silence is None else self.silence.doing(what)

    def beat(self, message: str | None = None) -> None:
        """Record progress in the heartbeat, by which a launcher finds ranks that hang."""
        if self.heartbeat is not None:
            self.heartbeat.beat(message)

    def send_report(self, report: Mapping[str, Any]) -> None:
        """Send the report to Dagster if it launched us, else to stdout. The frame calls it once, on rank 0."""
        if self.pipes is not None:
            self.pipes.report_custom_message({"report": dict(report)})
        else:
            print(json.dumps(report, indent=2), flush=True)


def run_program(
    run_type: type[RunType],
    main: Callable[[RunType, ProgramContext], dict[str, Any]],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run `main` on the run file named on the command line; its return value on rank 0 (JSON types) is the report.

    A `DraftworksError` prints only its message and exits with code 2; any other exception prints its traceback and
    exits with 1. Both go to torchelastic's error file if there is one. SIGTERM and SIGINT raise `Interrupted` in `main`
    once: repeats within `REPEATS_S` are ignored, a later one ends the process at once. Under torchrun, the end of
    torchrun counts as such a signal, followed by SIGKILL after torchrun's shutdown timeout. A process that was started
    by hand outlives its shell.
    """
    path = _parse_arguments(main, arguments)
    raise_on_stop()
    if is_torchelastic_launched():
        _end_with_torchrun()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request
    try:
        record(_run, error_handler=_RankErrorHandler())(run_type, main, path)
    except DraftworksError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except Interrupted as interrupt:
        print(interrupt, file=sys.stderr, flush=True)
        _RankErrorHandler().record_exception(interrupt)
        sys.exit(_SIGNAL_EXIT_BASE + interrupt.signum)


def _end_with_torchrun() -> None:
    """End this rank when torchrun ends; at once if torchrun was killed during imports, as init is the parent then."""
    parent = psutil.Process(os.getppid())
    if parent.pid == 1 and not any(name in " ".join(parent.cmdline()) for name in ("torchrun", "python")):
        sys.exit(_SIGNAL_EXIT_BASE + signal.SIGKILL)
    end_with_parent(float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_TIMEOUT_S)))


def _run(run_type: type[RunType], main: Callable[[RunType, ProgramContext], dict[str, Any]], path: Path) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        check_shared_folder_of_job(os.environ)
    run = _load_run_file(run_type, path)
    with _open_pipes() as pipes, _start_heartbeat() as heartbeat:
        context = ProgramContext.from_torchrun(pipes, heartbeat)
        if context.local_rank == 0 and isinstance(run, TargetRun):  # on every machine: each has its own disk
            require_unchanged(run.target)
        try:
            with _watch_silence(context):
                report = main(run, context)
        except Exception as error:
            full = explain_full_disk(error, run.out)
            if full is None or isinstance(error, DraftworksError):
                raise
            raise full from error
        if context.is_main:
            context.send_report(report)


@contextmanager
def _watch_silence(context: ProgramContext) -> Iterator[None]:
    """Let rank 0 say what it is doing while nothing else is printed."""
    if not context.is_main:
        yield
        return
    context.silence = Silence(context.print_line)
    with context.silence.watched():
        yield


def _load_run_file(run_type: type[RunType], path: Path) -> RunType:
    """Return the run file; in one of several copies of a job, that of this copy."""
    run = run_type.load(path)
    if COPY_VARIABLE not in os.environ or not isinstance(run, SharedRun):
        return run
    return run.of_copy(int(os.environ[COPY_VARIABLE]))


def _parse_arguments(main: Callable[..., Any], arguments: Sequence[str] | None) -> Path:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run_file", type=Path, metavar="FILE", help="the run file (YAML)")
    return parser.parse_args(arguments).run_file


@contextmanager
def _open_pipes() -> Iterator[PipesContext | None]:
    """Open Dagster Pipes on rank 0, if Dagster launched us; a second open one would close the session of the first.

    It is closed without the exception, which reaches Dagster by the error file and would else be shown twice.
    """
    if os.environ.get("RANK", "0") != "0" or not PipesEnvVarParamsLoader().is_dagster_pipes_process():
        yield None
        return
    pipes = open_dagster_pipes()
    try:
        yield pipes
    finally:
        pipes.close()


@contextmanager
def _start_heartbeat() -> Iterator[Heartbeat | None]:
    heartbeat = Heartbeat.beside_error_file()
    try:
        yield heartbeat
    finally:
        if heartbeat is not None:
            heartbeat.close()


class _RankErrorHandler(ErrorHandler):
    """Writes torchelastic's error file with the fields of `RankFailure`."""

    def record_exception(self, e: BaseException) -> None:
        path = self._get_error_file_path()
        if path:
            failure = RankFailure.of(e, rank=int(os.environ.get("RANK", "0")))
            self._write_error_file(path, json.dumps(failure.to_json()))


def _format_value(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
