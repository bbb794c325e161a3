"""Slurm, by its own commands on a host that shares a file system with the nodes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from draftworks.config.launchers import LauncherSpec, SlurmLauncherSpec
from draftworks.errors import LauncherError
from resources.scheduler import NAME_PREFIX, DeadCopy, JobRequest, Scheduler, SeenJob
from resources.slurm_commands import SlurmCommands, SlurmRecord
from resources.slurm_script import LOST_NODE_EXIT, STOPPED_EXIT, build_options, list_begun, write_script
from resources.torch_job import JobState, RunDir

RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_LOST = {
    "TIMEOUT": "its time limit",
    "PREEMPTED": "it was pre-empted",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "REVOKED": "it was revoked",
}
_LOST_CODES = {
    LOST_NODE_EXIT: "a node ended without an exit code of its torchrun: it was lost",
    STOPPED_EXIT: "a signal of Slurm stopped it: it was pre-empted, or near its time limit",
}
_NEVER = {
    "PartitionTimeLimit",
    "PartitionNodeLimit",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "InvalidAccount",
    "InvalidQOS",
    "AccountNotAllowed",
    "QOSNotAllowed",
}
"""Reasons for which a job waits for ever."""


def describe_records(records: Sequence[SlurmRecord]) -> SeenJob:
    """Return the state of one job from its records.

    An array has ended when all its elements have. It failed if one of them did; elements that someone cancelled count for
    nothing while others are left.
    """
    seen = [_describe(each) for each in records]
    if records[0].copy is None:
        return seen[0]
    dead = tuple(
        DeadCopy(record.copy or 0, record.restarts, each.lost)
        for record, each in zip(records, seen, strict=True)
        if each.state is JobState.FAILED
    )
    states = {each.state for each in seen}
    order = (JobState.RUNNING, JobState.PENDING, JobState.FAILED, JobState.SUCCEEDED, JobState.CANCELLED)
    state = next(each for each in order if each in states)
    first = next(each for each in seen if each.state is state)
    lost = state is JobState.FAILED and all(each.lost for each in dead)
    return SeenJob(first.id, first.name, state, first.reason, lost, first.claim, dead)


def find_hopeless(records: Sequence[SlurmRecord]) -> str:
    """Return the reason for which a job waits for ever; empty if it may start."""
    found = (each.reason for each in records if each.state == "PENDING" and each.reason in _NEVER)
    return next(found, "")


def is_final(record: SlurmRecord) -> bool:
    return _get_state(record).is_final


def _describe(record: SlurmRecord) -> SeenJob:
    state, reason, lost = _get_state(record), record.reason, record.state in _LOST
    if lost:
        reason = f"{record.state}: {_LOST[record.state]}"
    elif state is JobState.FAILED and record.exit_code in _LOST_CODES:
        lost, reason = True, _LOST_CODES[record.exit_code]
    elif state is JobState.FAILED:
        words = [each for each in (record.state, record.reason) if each not in ("FAILED", "NonZeroExitCode", "")]
        reason = ": ".join(words) or f"exit code {record.exit_code} of the job's script"
    claim = Path(record.comment) if record.comment else None
    return SeenJob(record.id, record.name, state, reason, lost, claim)


def _get_state(record: SlurmRecord) -> JobState:
    if record.state in _WAITING:
        return JobState.PENDING
    if record.state in RUNNING:
        return JobState.RUNNING
    if record.state == "COMPLETED":
        return JobState.SUCCEEDED
    return JobState.CANCELLED if record.state == "CANCELLED" else JobState.FAILED


QUESTION_INTERVAL_S = 2.0
"""Least time between two questions of one process about all of its jobs."""
_END_INTERVAL_S = 0.5
_ENDED_LONGEST_S = 300.0
"""Seconds for Slurm to kill a job, after its grace: its KillWait, and a node that does not answer."""


@dataclass
class SlurmQueue:
    """This user's jobs as squeue shows them, asked at most every `QUESTION_INTERVAL_S` whatever the number of jobs.

    Thread-safe: several steps of a process, and several launchers, share one.
    """

    commands: SlurmCommands
    interval_s: float = QUESTION_INTERVAL_S
    clock: Callable[[], float] = time.monotonic
    questions: int = 0
    _jobs: dict[str, list[SlurmRecord]] = field(default_factory=dict)
    _asked_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, id: str, submitted_at: float = float("-inf")) -> list[SlurmRecord] | None:
        """Return a job's records as they were at the last question; None if squeue did not show it then.

        Args:
            submitted_at: by `clock`; an earlier answer is not about it, so it is asked again.
        """
        with self._lock:
            if self.clock() - self._asked_at >= self.interval_s or self._asked_at <= submitted_at:
                self._ask()
            return self._jobs.get(id)

    def _ask(self) -> None:
        asked_at = self.clock()
        self.questions += 1
        found = self.commands.list_jobs(f"--user={os.getuid()}", "--states=all")
        self._jobs = _group(found)
        self._asked_at = asked_at


@cache
def get_queue(commands: SlurmCommands) -> SlurmQueue:
    """Return the one queue of this process for these commands."""
    return SlurmQueue(commands)


class SlurmScheduler(Scheduler):
    """Submits with sbatch, asks squeue (and sacct where it knows more), ends with scancel."""

    engine = "slurm"
    has_arrays = True

    def __init__(self, spec: SlurmLauncherSpec) -> None:
        self._spec = spec
        self._commands = SlurmCommands(spec.commands)
        self._queue = get_queue(self._commands)
        self._changed_at: dict[str, float] = {}
        self._files: dict[str, RunDir] = {}
        self._ended: dict[str, dict[int | None, SlurmRecord]] = {}

    def create(self, request: JobRequest) -> str:
        script = write_script(request, self._spec)
        id = self._commands.submit(script, request.env)
        self._changed_at[id] = self._queue.clock()
        self._files[id] = request.files
        return id

    def check(self, request: JobRequest) -> None:
        self._commands.test(build_options(request, self._spec))

    def find(self, name: str) -> SeenJob | None:
        found = self._commands.list_jobs(f"--name={name}", "--states=all")
        found = found or self._commands.list_accounted(f"--name={name}", "--starttime=now-30days")
        jobs = [describe_records(each) for each in _group(found).values()]
        alive = [job for job in jobs if not job.state.is_final]
        return max(alive or jobs, key=_get_age, default=None)

    def look(self, id: str) -> SeenJob | None:
        records = self._look(id)
        if not records:
            return None
        seen = describe_records(records)
        if hopeless := find_hopeless(records):
            self._commands.cancel(id)
            reason = f"Slurm would never start it: {hopeless}"
            return SeenJob(id, seen.name, JobState.FAILED, reason, claim=seen.claim)
        return self._explain_silence(seen)

    def end(self, id: str, grace_s: float) -> None:
        left = self._list_left(id)
        if not left:
            return
        try:
            self._end(id, left, grace_s)
        finally:
            self._changed_at[id] = self._queue.clock()  # what was answered before is out of date

    def _end(self, id: str, left: Sequence[SlurmRecord], grace_s: float) -> None:
        if any(each.state in RUNNING for each in left):
            if any(each.copy is not None for each in left):
                self._commands.cancel("--state=PENDING", id)
            # To the script alone, which hands it on once; Slurm's own way to cancel would give KillWait seconds at most.
            self._commands.cancel("--batch", "--signal=TERM", id)
            if self._has_ended_within(id, grace_s):
                return
        self._commands.cancel(id)
        if self._has_ended_within(id, 0.0 if all(each.state == "PENDING" for each in left) else _END_INTERVAL_S):
            return
        self._commands.cancel("--full", "--signal=KILL", id)
        if not self._has_ended_within(id, _ENDED_LONGEST_S):
            raise LauncherError(
                f"Slurm: job {id} has not ended {_ENDED_LONGEST_S:g} s after it was killed: scancel {id}"
            )

    def list(self) -> list[SeenJob]:
        found = _group(each for each in self._commands.list_jobs() if each.name.startswith(NAME_PREFIX))
        return [describe_records(each) for each in found.values()]

    def restart(self, id: str, copy: int) -> None:
        self._commands.requeue(id, copy)
        self._changed_at[id] = self._queue.clock()

    def _explain_silence(self, job: SeenJob) -> SeenJob:
        """Say so if a failed job of this process has not even begun: then its node does not see the folder, most likely."""
        files = self._files.get(job.id)
        if job.state is not JobState.FAILED or job.lost or files is None:
            return job
        if list_begun(files) or files.log.exists():
            return job
        words = f"no node has written into {files.path}: does every node see this folder, and may it write there?"
        return replace(job, reason=f"{words} ({job.reason})")

    def _look(self, id: str) -> list[SlurmRecord]:
        """Return a job from the common answer; another user's, or one that squeue has forgotten, by a question of its own.

        Slurm forgets each element of an array some minutes after its end: those that were seen ended are added.
        """
        found = self._queue.find(id, self._changed_at.get(id, float("-inf"))) or self._ask(id)
        ended = self._ended.setdefault(id, {})
        for each in found:
            ended.pop(each.copy, None)
        forgotten = list(ended.values())
        ended.update({each.copy: each for each in found if each.copy is not None and is_final(each)})
        return [*found, *forgotten]

    def _ask(self, id: str) -> list[SlurmRecord]:
        found = self._commands.list_jobs(f"--jobs={id}", "--states=all") or self._commands.list_accounted(
            f"--jobs={id}"
        )
        return [each for each in found if each.id == id]

    def _list_left(self, id: str) -> list[SlurmRecord]:
        """Return the elements of a job that have not ended."""
        return [each for each in self._ask(id) if not is_final(each)]

    def _has_ended_within(self, id: str, seconds: float) -> bool:
        """Wait until none of a job's processes is left: Slurm says COMPLETING for as long as there are some."""
        deadline = time.monotonic() + seconds
        while True:
            if not self._list_left(id):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(_END_INTERVAL_S, max(0.0, deadline - time.monotonic())))


def make_scheduler(spec: LauncherSpec) -> SlurmScheduler:
    """Return the scheduler of a launcher of kind slurm."""
    assert isinstance(spec, SlurmLauncherSpec)
    return SlurmScheduler(spec)


def _group(records: Iterable[SlurmRecord]) -> dict[str, list[SlurmRecord]]:
    """Return the records of each job, by its id."""
    jobs: dict[str, list[SlurmRecord]] = {}
    for each in records:
        jobs.setdefault(each.id, []).append(each)
    return jobs


def _get_age(job: SeenJob) -> int:
    number = job.id.split("_")[0]
    return int(number) if number.isdigit() else 0
