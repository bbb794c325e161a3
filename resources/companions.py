"""Jobs that run beside another job, such as producers beside the training that uses their features."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from resources.job_failure import describe_job_failure
from resources.torch_job import JobState, JobStatus, RunDir, TorchJob


@dataclass(frozen=True)
class Companion:
    """A job to run beside another, with the folder in which its attempts' folders are made."""

    job: TorchJob
    folder: Path


@dataclass(frozen=True)
class RunningCompanion:
    """A submitted companion: the launcher's handle, and its files."""

    job: TorchJob
    handle: Any
    files: RunDir


class RunningCompanions:
    """The submitted companions of one job.

    Args:
        poll, cancel: of the launcher.
    """

    def __init__(
        self,
        running: Sequence[RunningCompanion],
        poll: Callable[[Any], JobStatus],
        cancel: Callable[[Any], None],
    ) -> None:
        self._running = running
        self._poll = poll
        self._cancel = cancel

    @property
    def logs(self) -> dict[str, dg.PathMetadataValue]:
        return {f"log_{each.files.path.parent.name}": dg.MetadataValue.path(each.files.log) for each in self._running}

    def raise_failure(self) -> None:
        """Raise the failure of the first companion that has failed; what it leads to elsewhere is not the cause."""
        for each in self._running:
            status = self._poll(each.handle)
            if status.state in (JobState.FAILED, JobState.CANCELLED):
                failure = describe_job_failure(each.job, each.files, status, self.logs)
                description = f"{each.files.path.parent.name}: {failure.description}"
                raise dg.Failure(description, failure.metadata, allow_retries=failure.allow_retries)

    def finish(self, grace_s: float) -> None:
        """Give the companions `grace_s` to end by themselves, now that the job has succeeded; then cancel them."""
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and not all(self._poll(each.handle).state.is_final for each in self._running):
            time.sleep(0.1)
        self.cancel()

    def cancel(self) -> None:
        """End all companions that still run."""
        for each in self._running:
            if not self._poll(each.handle).state.is_final:
                self._cancel(each.handle)
