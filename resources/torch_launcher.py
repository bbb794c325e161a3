"""Running a torchrun job from an asset: what to run is a `TorchJob`, where it runs is a `TorchLauncher`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from resources.job_failure import failure_of_job, failure_of_report, failure_of_time_limit, words_of_interrupted
from resources.log_tail import LogTail
from resources.torch_job import JobState, JobStatus, RunDir, TorchJob


@dataclass(frozen=True)
class JobResult:
    """What the program reported, and what the launcher knows of the run: engine, job id, log path, seconds."""

    report: dict[str, Any]
    metadata: dict[str, Any]


class _MessagesOfRank0(dg.PipesFileMessageReader):
    """Reads the messages of one writer. Saying so spares every job a warning: Dagster calls its own property a preview."""

    expected_writer_count = 1


class TorchLauncher(dg.ConfigurableResource, ABC):
    """Where torchrun jobs run. Subclasses say how to `submit`, `poll`, `cancel` and `describe`; `run` does the rest.

    A handle is whatever `submit` returns: a process, a job id.
    """

    workdir: str = Field("var/runs", description="Run folders (logs, error files) are made here.")
    poll_interval_s: float = Field(0.2, gt=0, description="Seconds between two looks at a running job.")
    log_limit_mb: int = Field(8, ge=1, description="Output copied to the run page, in MiB; the log file has it all.")

    @abstractmethod
    def submit(self, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> Any:
        """Start the job with `env` added to its environment and all output in `run_dir.log`. Returns a handle."""

    @abstractmethod
    def poll(self, handle: Any) -> JobStatus:
        """How the job is, without waiting."""

    @abstractmethod
    def cancel(self, handle: Any) -> None:
        """End the job. Returns only when nothing of it is left."""

    @abstractmethod
    def describe(self, handle: Any) -> dict[str, str | int]:
        """Engine and job id, for metadata."""

    def run(
        self,
        context: dg.AssetExecutionContext,
        job: TorchJob,
        extras: Mapping[str, Any] | None = None,
        run_dir: Path | None = None,
    ) -> JobResult:
        """Run the job to its end and return its one report.

        `run_dir` is the folder in which this attempt's own folder is made (default: one named after the asset in
        `workdir`). Whatever ends the wait early, the cancellation of the Dagster run included, cancels the job.

        Raises dagster.Failure with the first failed rank's message and traceback; without retries for a
        `DraftworksError`, a job over its time limit, and a success that did not send exactly one report.
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
                "TORCHELASTIC_ERROR_FILE": str(files.error),
                "PYTHONUNBUFFERED": "1",
            }
            metadata = self._run_to_end(context, job, env, files)
        # The session's end has read the last message.
        messages = session.get_custom_messages()
        reports = [message["report"] for message in messages if isinstance(message, dict) and "report" in message]
        if len(reports) != 1:
            raise failure_of_report(job, len(reports), metadata)
        return JobResult(report=reports[0], metadata=metadata)

    def _run_to_end(
        self, context: dg.AssetExecutionContext, job: TorchJob, env: Mapping[str, str], files: RunDir
    ) -> dict[str, Any]:
        """Submit, wait and copy the log; returns the metadata of a success."""
        started = time.monotonic()
        tail = LogTail(files.log, self.log_limit_mb << 20)
        handle = self.submit(job, env, files)
        try:
            metadata = {**self.describe(handle), "log": dg.MetadataValue.path(files.log)}
            context.log.info(f"started {job.module} with {job.procs_per_node} rank(s): {self.describe(handle)}")
            status = self._wait(handle, job, tail, metadata)
        except dg.DagsterExecutionInterruptedError:
            self.cancel(handle)
            raise dg.DagsterExecutionInterruptedError(words_of_interrupted(files)) from None
        except BaseException:
            self.cancel(handle)
            raise
        finally:
            tail.finish()
        metadata["seconds"] = round(time.monotonic() - started, 2)
        if status.state is not JobState.SUCCEEDED:
            raise failure_of_job(job, files, status, metadata)
        return metadata

    def _wait(self, handle: Any, job: TorchJob, tail: LogTail, metadata: Mapping[str, Any]) -> JobStatus:
        running_since: float | None = None
        while not (status := self.poll(handle)).state.is_final:
            now = time.monotonic()
            if status.state is JobState.RUNNING and running_since is None:
                running_since = now
            if job.time_limit_s and running_since is not None and now - running_since > job.time_limit_s:
                raise failure_of_time_limit(job, metadata)
            tail.copy()
            time.sleep(self.poll_interval_s)
        return status
