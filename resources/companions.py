"""Jobs that run beside another job, such as producers beside the training that uses their features."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg

from resources.job_failure import describe_job_failure, has_failure_message
from resources.torch_job import JobState, JobStatus, RunDir, TorchJob


@dataclass(frozen=True)
class Companion:
    """A job to run beside another.

    Attributes:
        folder: the folder in which its attempts' folders are made.
        serves: whether it runs until it is ended, because the others use it, such as a control server.
        restarts: how often it is started again after it was killed. An error that it leaves ends all at once.
    """

    job: TorchJob
    folder: Path
    serves: bool = False
    restarts: int = 0


@dataclass
class RunningCompanion:
    """A submitted companion: the launcher's handle, and its files.

    Attributes:
        restarted: how often it was started again.
        final: its status, once it has ended: a launcher may search for what a job has left whenever it is asked.
    """

    companion: Companion
    handle: Any
    files: RunDir
    restarted: int = 0
    final: JobStatus | None = None


class RunningCompanions:
    """The companions of one job, started, watched, and started again when they are killed.

    Args:
        submit: of the launcher: starts a companion's job, and returns its handle and files.
        poll, cancel: of the launcher.
        warn: called with what became of a companion.
        settle: of the launcher: what is known of an ended job is forgotten.
    """

    def __init__(
        self,
        submit: Callable[[Companion], RunningCompanion],
        poll: Callable[[Any], JobStatus],
        cancel: Callable[[Any], None],
        warn: Callable[[str], None],
        settle: Callable[[Any], None] = lambda handle: None,
    ) -> None:
        self._running: list[RunningCompanion] = []
        self._submit = submit
        self._poll = poll
        self._cancel = cancel
        self._warn = warn
        self._settle = settle

    def start(self, companion: Companion) -> None:
        self._running.append(self._submit(companion))

    @property
    def logs(self) -> dict[str, dg.PathMetadataValue]:
        return {f"log_{each.companion.folder.name}": dg.MetadataValue.path(_locate_log(each)) for each in self._running}

    def watch(self) -> None:
        """Start killed companions again, and raise the first failure that a new start does not mend."""
        self.raise_failure()
        for index, each in enumerate(self._running):
            if self._has_ended(each):
                self._warn(
                    f"{each.companion.folder.name} has died, and is started again. Its log was {_locate_log(each)}"
                )
                self._running[index] = replace(self._submit(each.companion), restarted=each.restarted + 1)

    def raise_failure(self) -> None:
        """Raise the failure of the first companion that left an error or was killed too often."""
        for each in self._running:
            if not self._has_ended(each):
                continue
            if not has_failure_message(each.files) and each.restarted < each.companion.restarts:
                continue
            failure = describe_job_failure(each.companion.job, each.files, self._look(each), self.logs)
            description = f"{each.companion.folder.name}: {failure.description}"
            raise dg.Failure(description, failure.metadata, allow_retries=failure.allow_retries)

    def finish(self, grace_s: float) -> None:
        """Give the companions `grace_s` to end by themselves, now that the job has succeeded; then cancel them."""
        deadline = time.monotonic() + grace_s
        ending = [each for each in self._running if not each.companion.serves]
        while time.monotonic() < deadline and not all(self._look(each).state.is_final for each in ending):
            time.sleep(0.1)
        self.cancel()

    def cancel(self) -> None:
        """End all companions that still run, those that serve the others last."""
        for each in sorted(self._running, key=lambda each: each.companion.serves):
            if self._look(each).state.is_final:
                self._settle(each.handle)
            else:
                self._cancel(each.handle)

    def _look(self, each: RunningCompanion) -> JobStatus:
        status = each.final or self._poll(each.handle)
        each.final = status if status.state.is_final else None
        return status

    def _has_ended(self, each: RunningCompanion) -> bool:
        """Whether a companion has ended before its time."""
        state = self._look(each).state
        return state.is_final if each.companion.serves else state in (JobState.FAILED, JobState.CANCELLED)


def _locate_log(each: RunningCompanion) -> Path:
    """Return a companion's log; of several copies, which have one each, the folder."""
    return each.files.log if each.companion.job.copies == 1 else each.files.path
