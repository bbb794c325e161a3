"""Runs torchrun jobs for assets: a `TorchJob` says what to run, a `TorchLauncher` where."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field, PrivateAttr

from draftworks.config.launchers import LauncherSpec
from draftworks.distributed.stop_signals import defer_interrupt
from draftworks.programs.heartbeat import LABEL, HeartbeatRecord
from resources.companions import Companion, RunningCompanion, RunningCompanions
from resources.job_failure import (
    describe_job_failure,
    describe_missing_report,
    describe_stall,
    describe_time_limit,
    read_interruption,
)
from resources.job_messages import Bookmark, LogTail
from resources.stall_watch import StallWatch
from resources.torch_job import JobState, JobStatus, RunDir, TorchJob

COMPANION_GRACE_S = 20.0
"""Seconds that companions have to end by themselves after the job that they run beside has succeeded."""


@dataclass(frozen=True)
class JobResult:
    """The program's report, and the launcher's metadata: engine, job id, log path, seconds."""

    report: dict[str, Any]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class PeerJob:
    """One of several jobs that run side by side, each with a report of its own.

    Attributes:
        name: for messages, and before its lines on the run page.
        folder: in which the folder of each attempt is made.
    """

    name: str
    job: TorchJob
    folder: Path


Outcome = JobResult | dg.Failure
"""How a job ended; an interruption is an exception and no outcome."""


@dataclass(frozen=True)
class PreparedFiles:
    """The files of a job that is about to be started, or that is found running.

    Attributes:
        messages: reads its messages.
        shown: how much of its log an earlier process has shown; None for a job that never outlives its process.
    """

    files: RunDir
    messages: dg.PipesMessageReader
    shown: Bookmark | None = None


@dataclass(frozen=True)
class JobLimits:
    """Times in seconds by which a job is watched; see the fields of `TorchLauncher`."""

    stall_limit_s: float | None
    time_limit_s: float | None
    poll_interval_s: float


@dataclass
class _RunningJob:
    """A submitted job; `failure` and `seconds` are set when it has ended.

    Attributes:
        tail: copies its output to the step's compute log; None for a job whose output stays in its own log.
    """

    peer: PeerJob
    files: RunDir
    handle: Any
    session: dg.PipesSession
    watch: StallWatch
    tail: LogTail | None
    metadata: dict[str, Any]
    limits: JobLimits
    started: float
    running_since: float | None = None
    has_ended: bool = False
    failure: dg.Failure | None = None


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
    _clock: Callable[[], float] = PrivateAttr(default=time.monotonic)
    """Of the limits of stall and time."""

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

    def prepare(self, context: dg.AssetExecutionContext, job: TorchJob, folder: Path) -> PreparedFiles:
        """Return the files of a new attempt in `folder`, or those of the same job if it runs already."""
        files = RunDir.create(folder, context.run.run_id, context.retry_number)
        return PreparedFiles(files, _MessagesOfRank0(str(files.messages)))

    def get_limits(self, handle: Any) -> JobLimits:
        return JobLimits(self.stall_limit_s, self.time_limit_s, self.poll_interval_s)

    def has_arrays(self, spec: LauncherSpec) -> bool:
        """Whether a job with these settings may ask for several copies of itself."""
        return False

    def locate_files(self, handle: Any, files: RunDir) -> RunDir:
        """Return the files of a job that began with `files`; others if it was submitted again meanwhile."""
        return files

    def settle(self, handle: Any) -> None:
        """Forget a job that has ended, now that its outcome is known."""

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
        peer = PeerJob(context.op_execution_context.op_handle.name, job, base)
        outcome = self.run_together(context, [peer], companions, extras)[peer.name]
        if isinstance(outcome, dg.Failure):
            raise outcome
        return outcome

    def run_together(
        self,
        context: dg.AssetExecutionContext,
        peers: Sequence[PeerJob],
        companions: Sequence[Companion] = (),
        extras: Mapping[str, Any] | None = None,
        on_failure: Callable[[str, dg.Failure], None] = lambda name, failure: None,
    ) -> dict[str, Outcome]:
        """Run jobs side by side to the end of the last one; return how each ended, by name.

        A job that fails, stalls or runs over its time ends alone: `on_failure` is called at once with its name and its
        failure, and the others go on. A failure of a companion ends all jobs and is raised, and so does an interrupt.
        """

        def submit(companion: Companion) -> RunningCompanion:
            own = self.prepare(context, companion.job, companion.folder).files
            handle = self.submit(companion.job, {**companion.job.env, **make_error_environment(own)}, own)
            return RunningCompanion(companion, handle, own)

        beside = RunningCompanions(submit, self.poll, self.cancel, context.log.warning, self.settle)
        with ExitStack() as sessions:
            try:
                for each in companions:
                    beside.start(each)
                jobs = self._run_to_end(context, peers, dict(extras or {}), sessions, beside, on_failure)
                if any(each.failure is None for each in jobs):
                    beside.finish(COMPANION_GRACE_S)
                else:
                    beside.cancel()
            except BaseException:
                beside.cancel()
                raise
        # All messages have been read when the sessions have ended.
        outcomes = {each.peer.name: _read_outcome(each, beside.logs) for each in jobs}
        for each in jobs:
            self.settle(each.handle)
        return outcomes

    def _run_to_end(
        self,
        context: dg.AssetExecutionContext,
        peers: Sequence[PeerJob],
        extras: Mapping[str, Any],
        sessions: ExitStack,
        companions: RunningCompanions,
        on_failure: Callable[[str, dg.Failure], None],
    ) -> list[_RunningJob]:
        """Submit all jobs, and wait until each has ended.

        An interrupt of the step is handled between two polls, so that it cancels the jobs once: a second interrupt
        within moments, as schedulers send it, does not shorten the ranks' grace for saving."""
        jobs: list[_RunningJob] = []
        with defer_interrupt() as pass_on_interrupt:
            try:
                for peer in peers:
                    own = {**extras, **({LABEL: peer.name} if len(peers) > 1 else {})}
                    jobs.append(self._start(context, peer, own, sessions, shows_output=not jobs))
                while waiting := [each for each in jobs if not each.has_ended]:
                    for each in waiting:
                        self._look(each, companions)
                        if each.failure is not None:
                            on_failure(each.peer.name, each.failure)
                    pass_on_interrupt()
                    if not all(each.has_ended for each in jobs):
                        companions.watch()
                        time.sleep(min(each.limits.poll_interval_s for each in jobs if not each.has_ended))
            except dg.DagsterExecutionInterruptedError:
                self._cancel_all(jobs)
                words = [read_interruption(each.files) for each in jobs]
                raise dg.DagsterExecutionInterruptedError("; ".join(filter(None, words))) from None
            except BaseException:
                self._cancel_all(jobs)
                raise
            finally:
                for each in jobs:
                    if each.tail is not None:
                        each.tail.finish()
        return jobs

    def _start(
        self,
        context: dg.AssetExecutionContext,
        peer: PeerJob,
        extras: Mapping[str, Any],
        sessions: ExitStack,
        shows_output: bool,
    ) -> _RunningJob:
        job, prepared = peer.job, self.prepare(context, peer.job, peer.folder)
        files = prepared.files
        session = sessions.enter_context(
            dg.open_pipes_session(
                context=context,
                context_injector=dg.PipesEnvContextInjector(),
                message_reader=prepared.messages,
                extras=dict(extras),
            )
        )
        env = {**job.env, **session.get_bootstrap_env_vars(), **make_error_environment(files)}
        handle = self.submit(job, env, files)
        place, limits = self.describe(handle), self.get_limits(handle)
        context.log.info(f"started {job.module} with {job.procs_per_node} rank(s): {place}")
        return _RunningJob(
            peer=peer,
            files=files,
            handle=handle,
            session=session,
            watch=self._make_watch(job, files, limits),
            tail=LogTail(files.log, self.log_limit_mb << 20, prepared.shown) if shows_output else None,
            metadata={**place, "log": dg.MetadataValue.path(files.log)},
            limits=limits,
            started=self._clock(),
        )

    def _make_watch(self, job: TorchJob, files: RunDir, limits: JobLimits) -> StallWatch:
        return StallWatch(files.ranks, files.log, (limits.stall_limit_s or math.inf) + job.longest_wait_s, self._clock)

    def _look(self, running: _RunningJob, companions: RunningCompanions) -> None:
        """Note whether a job has ended; end one without progress or over its time.

        Raises dagster.Failure of a companion if the job failed and the companion did too: that is the cause.
        """
        status, now = self.poll(running.handle), self._clock()
        files = self.locate_files(running.handle, running.files)
        job, metadata, limits = running.peer.job, running.metadata, running.limits
        if files != running.files:
            running.files, running.watch = files, self._make_watch(job, files, limits)
            metadata.update(self.describe(running.handle))
        if status.state.is_final:
            running.has_ended = True
            metadata["seconds"] = round(now - running.started, 2)
            if status.state is not JobState.SUCCEEDED:
                companions.raise_failure()
                running.failure = describe_job_failure(job, files, status, metadata)
        elif status.state is JobState.RUNNING:
            running.running_since = running.running_since or now
            if limits.time_limit_s and now - running.running_since > limits.time_limit_s:
                running.failure = describe_time_limit(job, limits.time_limit_s, metadata)
            elif (stalled := running.watch.find_stalled()) is not None:
                states = self.ask_for_stacks(running.handle, stalled)
                ranks = list(zip(stalled, states, strict=True))
                running.failure = describe_stall(job, files, running.watch.limit_s, ranks, metadata)
            if running.failure is not None:
                running.has_ended = True
                self.cancel(running.handle)
        if running.tail is not None:
            running.tail.copy()

    def _cancel_all(self, jobs: Sequence[_RunningJob]) -> None:
        """Cancel the jobs that still run at one time, so that each has the whole grace for saving."""
        handles = [each.handle for each in jobs if not each.has_ended]
        if len(handles) < 2:
            for handle in handles:
                self.cancel(handle)
            return
        with ThreadPoolExecutor(len(handles)) as pool:
            list(pool.map(self.cancel, handles))


def _read_outcome(ended: _RunningJob, logs: Mapping[str, Any]) -> Outcome:
    """Return the one report of a job that succeeded; otherwise its failure."""
    if ended.failure is not None:
        return ended.failure
    metadata = {**ended.metadata, **logs}
    messages = ended.session.get_custom_messages()
    reports = [message["report"] for message in messages if isinstance(message, dict) and "report" in message]
    if len(reports) != 1:
        return describe_missing_report(ended.peer.job, len(reports), metadata)
    return JobResult(report=reports[0], metadata=metadata)


def make_error_environment(files: RunDir) -> dict[str, str]:
    return {"TORCHELASTIC_ERROR_FILE": str(files.error), "PYTHONUNBUFFERED": "1"}
