"""Runs torchrun jobs for assets: a `TorchJob` says what to run, a `TorchLauncher` where."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from draftworks.distributed.stop_signals import defer_interrupt
from draftworks.programs.heartbeat import HeartbeatRecord
from resources.companions import Companion, RunningCompanion, RunningCompanions
from resources.job_failure import (
    describe_job_failure,
    describe_missing_report,
    describe_stall,
    describe_time_limit,
    read_interruption,
)
from resources.log_tail import LogTail
from resources.stall_watch import StallWatch
from resources.torch_job import JobState, JobStatus, RunDir, TorchJob

COMPANION_GRACE_S = 20.0
"""Seconds that companions have to end by themselves after the job that they run beside has succeeded."""


@dataclass(frozen=True)
class JobResult:
    """The program's report, and the launcher's metadata: engine, job id, log path, seconds."""

    report: dict[str, Any]
    metadata: dict[str, Any]


class _MessagesOfRank0(dg.PipesFileMessageReader):
    """Reads the messages of one writer. The attribute avoids a PreviewWarning of Dagster for every job."""

    @property
    def expected_writer_count(self) -> int:
        return 1


class TorchLauncher(dg.ConfigurableResource, ABC):
    """Where torchrun jobs run. Subclasses say how to `submit`, `poll`, `cancel` and `describe`; `run` does the rest.

    A handle is whatever `submit` returns: a process, a job id.
    """

    workdir: str = Field(default="var/runs", description="Run folders (logs, error files) are made here.")
    poll_interval_s: float = Field(default=0.2, gt=0, description="Seconds between two polls of a running job.")
    stall_limit_s: float | None = Field(
        default=1800.0,
        gt=0,
        description="Seconds without any progress after which a job is ended; None waits for ever.",
    )
    time_limit_s: float | None = Field(default=None, gt=0, description="Seconds that a job may run.")
    log_limit_mb: int = Field(
        default=8, ge=1, description="Output copied to the run page, in MiB; the log file has it all."
    )

    @abstractmethod
    def submit(self, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> Any:
        """Start the job with `env` added to its environment and all output in `run_dir.log`. Returns a handle."""

    @abstractmethod
    def poll(self, handle: Any) -> JobStatus:
        """Return the job's status without waiting."""

    @abstractmethod
    def cancel(self, handle: Any) -> None:
        """End the job. Returns when all of its processes have ended."""

    @abstractmethod
    def describe(self, handle: Any) -> dict[str, str | int]:
        """Return engine and job id, for metadata."""

    def ask_for_stacks(self, handle: Any, ranks: Sequence[HeartbeatRecord]) -> list[str]:
        """Make the ranks print their stacks into the job's log if possible; return the state of each process."""
        return ["state unknown"] * len(ranks)

    def run(
        self,
        context: dg.AssetExecutionContext,
        job: TorchJob,
        extras: Mapping[str, Any] | None = None,
        run_dir: Path | None = None,
        companions: Sequence[Companion] = (),
    ) -> JobResult:
        """Run the job to its end and return its one report.

        `run_dir` is the folder in which this attempt's own folder is made (default: one named after the asset in
        `workdir`). Whatever ends the wait early, the cancellation of the Dagster run included, cancels the job.

        `companions` run beside the job, each with a log of its own; they end with it, and a failure of one ends it. One
        that was killed is started again, as often as it says.

        Raises dagster.Failure with the first failed rank's message and traceback; without retries for a
        `DraftworksError`, a job over its time limit, and a success that did not send exactly one report. A job without
        progress for `stall_limit_s` is ended, and the failure names the last place of each rank.
        """
        base = run_dir or Path(self.workdir) / context.op_execution_context.op_handle.name
        files = RunDir.create(base, context.run.run_id, context.retry_number)
        with dg.open_pipes_session(
            context=context,
            context_injector=dg.PipesEnvContextInjector(),
            message_reader=_MessagesOfRank0(str(files.messages)),
            extras=dict(extras or {}),
        ) as session:
            env = {
                **job.env,
                **session.get_bootstrap_env_vars(),
                **_make_error_environment(files),
            }
            metadata = self._run_beside(context, job, env, files, companions)
        # All messages have been read when the session has ended.
        messages = session.get_custom_messages()
        reports = [message["report"] for message in messages if isinstance(message, dict) and "report" in message]
        if len(reports) != 1:
            raise describe_missing_report(job, len(reports), metadata)
        return JobResult(report=reports[0], metadata=metadata)

    def _run_beside(
        self,
        context: dg.AssetExecutionContext,
        job: TorchJob,
        env: Mapping[str, str],
        files: RunDir,
        companions: Sequence[Companion],
    ) -> dict[str, Any]:
        """Run the job to its end beside its companions; returns the metadata of a success."""

        def submit(companion: Companion) -> RunningCompanion:
            own = RunDir.create(companion.folder, context.run.run_id, context.retry_number)
            handle = self.submit(companion.job, {**companion.job.env, **_make_error_environment(own)}, own)
            return RunningCompanion(companion, handle, own)

        beside = RunningCompanions(submit, self.poll, self.cancel, context.log.warning)
        try:
            for each in companions:
                beside.start(each)
            metadata = self._run_to_end(context, job, env, files, beside)
            beside.finish(COMPANION_GRACE_S)
        except BaseException:
            beside.cancel()
            raise
        return {**metadata, **beside.logs}

    def _run_to_end(
        self,
        context: dg.AssetExecutionContext,
        job: TorchJob,
        env: Mapping[str, str],
        files: RunDir,
        companions: RunningCompanions,
    ) -> dict[str, Any]:
        """Submit, wait and copy the log; returns the metadata of a success.

        An interrupt of the step is handled between two polls, so that it cancels the job once: a second interrupt
        within moments, as schedulers send it, does not shorten the ranks' grace for saving."""
        started = time.monotonic()
        tail = LogTail(files.log, self.log_limit_mb << 20)
        with defer_interrupt() as pass_on_interrupt:
            handle = self.submit(job, env, files)
            try:
                metadata = {**self.describe(handle), "log": dg.MetadataValue.path(files.log)}
                context.log.info(f"started {job.module} with {job.procs_per_node} rank(s): {self.describe(handle)}")
                status = self._wait(handle, job, files, tail, metadata, pass_on_interrupt, companions)
                pass_on_interrupt()
            except dg.DagsterExecutionInterruptedError:
                self.cancel(handle)
                raise dg.DagsterExecutionInterruptedError(read_interruption(files)) from None
            except BaseException:
                self.cancel(handle)
                raise
            finally:
                tail.finish()
        metadata["seconds"] = round(time.monotonic() - started, 2)
        if status.state is not JobState.SUCCEEDED:
            raise describe_job_failure(job, files, status, metadata)
        return metadata

    def _wait(
        self,
        handle: Any,
        job: TorchJob,
        files: RunDir,
        tail: LogTail,
        metadata: Mapping[str, Any],
        pass_on_interrupt: Callable[[], None],
        companions: RunningCompanions,
    ) -> JobStatus:
        running_since: float | None = None
        limit_s = self.time_limit_s
        watch = StallWatch(files.ranks, files.log, (self.stall_limit_s or math.inf) + job.longest_wait_s)
        while not (status := self.poll(handle)).state.is_final:
            pass_on_interrupt()
            companions.watch()
            now = time.monotonic()
            if status.state is JobState.RUNNING and running_since is None:
                running_since = now
            if limit_s and running_since is not None and now - running_since > limit_s:
                raise describe_time_limit(job, limit_s, metadata)
            if running_since is not None and (stalled := watch.find_stalled()) is not None:
                states = self.ask_for_stacks(handle, stalled)
                raise describe_stall(job, files, watch.limit_s, list(zip(stalled, states, strict=True)), metadata)
            tail.copy()
            time.sleep(self.poll_interval_s)
        if status.state is not JobState.SUCCEEDED:
            companions.raise_failure()
        return status


def _make_error_environment(files: RunDir) -> dict[str, str]:
    return {"TORCHELASTIC_ERROR_FILE": str(files.error), "PYTHONUNBUFFERED": "1"}
