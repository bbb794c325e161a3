"""The launcher of jobs that live in a scheduler, such as Slurm, and survive the process that submitted them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import dagster as dg
from pydantic import Field

from draftworks.config.launchers import LauncherSpec, SchedulerLauncherSpec, parse_launcher
from draftworks.errors import LauncherError
from draftworks.storage.shared_folder import write_folder_token
from resources.dead_runs import JOB_TAG, has_run_process_ended
from resources.job_adoption import Adoption, has_ended_unheard
from resources.job_claims import CLAIM, JobClaim
from resources.job_failure import has_failure_message, is_interrupted, is_user_error
from resources.job_messages import Bookmark, JobMessages, has_report
from resources.process_tree import RunProcess
from resources.scheduler import NAME_PREFIX, DeadCopy, JobRequest, Scheduler, SeenJob, make_scheduler
from resources.torch_job import JobIdentity, JobState, JobStatus, RunDir, TorchJob
from resources.torch_launcher import JobLimits, PreparedFiles, TorchLauncher, make_error_environment

MAX_KILLS = 10
"""Deaths of one copy without a message after which the job has failed. The others do its work meanwhile."""


class CopyVerdict(NamedTuple):
    """The actions for a job's copies.

    Attributes:
        restart: numbers of those to start again.
        failure: why the whole job has failed; empty if it has not.
        is_open: whether a copy has died of which it is not known yet why.
    """

    restart: tuple[int, ...] = ()
    failure: str = ""
    is_open: bool = False


@dataclass
class CopyWatch:
    """Judges each death of a copy once, by what its ranks left, and only then by what the scheduler says.

    An error of the program fails the job. A copy that was interrupted in order, that the scheduler ended, or that was killed
    is started again.

    Attributes:
        files_lag_s: seconds in which the shared file system shows what an ended copy has written.
    """

    files_lag_s: float
    clock: Callable[[], float] = time.monotonic
    _since: dict[DeadCopy, float] = field(default_factory=dict)
    _judged: set[DeadCopy] = field(default_factory=set)
    _kills: Counter[int] = field(default_factory=Counter)

    def judge(self, seen: SeenJob, files: RunDir) -> CopyVerdict:
        restart: list[int] = []
        is_open = False
        for each in seen.dead:
            if each in self._judged:
                continue
            own = files.of_copy(each.number)
            spoke = has_failure_message(own)
            was_stopped = each.lost or is_interrupted(own)
            if not spoke and not was_stopped and self._is_early(each):
                is_open = True
                continue
            # Ranks whose peers were lost with a node leave errors of their connections.
            if spoke and (not was_stopped or is_user_error(own)):
                return CopyVerdict(failure=f"copy {each.number} failed, its log is {own.log}")
            self._judged.add(each)
            self._kills[each.number] += not was_stopped
            if self._kills[each.number] > MAX_KILLS:
                return CopyVerdict(failure=f"copy {each.number} was killed {MAX_KILLS} times, its log is {own.log}")
            restart.append(each.number)
        return CopyVerdict(tuple(restart), is_open=is_open)

    def _is_early(self, dead: DeadCopy) -> bool:
        """Whether files of a copy may not be visible yet."""
        now = self.clock()
        return now - self._since.setdefault(dead, now) < self.files_lag_s


MAX_FRUITLESS = 3
"""Submissions in a row without a new checkpoint after which a job that the scheduler keeps ending has failed."""
_REMINDER_S = 300.0
_UNSEEN_OWNER_S = 600.0
_LOOK_INTERVAL_S = 0.2


@dataclass
class ScheduledJob:
    """A job of a scheduler.

    Attributes:
        files: of the present submission.
        owner: this process, as the claim has it.
        progress: the checkpoints, or what else it goes on from, that were there when it was submitted.
        fruitless: submissions in a row without anything new there, the present one included.
        status: what the last look at it said.
        reason: the scheduler's own words then.
        unseen_since: since when the scheduler cannot be asked; None if it can.
        unsubmitted_since: since when it does not take the job again; None if it did.
        copies: what is known of its dead copies, if it has several.
    """

    id: str
    job: TorchJob
    identity: JobIdentity
    env: Mapping[str, str]
    files: RunDir
    owner: RunProcess
    progress: frozenset[tuple[str, int]]
    copies: CopyWatch
    fruitless: int = 1
    status: JobStatus = JobStatus(JobState.PENDING)
    reason: str = ""
    was_cancelled: bool = False
    looked_at: float = field(default=float("-inf"), repr=False)
    unseen_since: float | None = None
    unsubmitted_since: float | None = None
    reminded_at: float = field(default=float("-inf"), repr=False)


class SchedulerLauncher(TorchLauncher):
    """Runs jobs in a scheduler, on a file system that all its machines share with this one.

    What became of a job is read from its ranks' error files and its report, and only then from the scheduler's state. A
    cancellation ends the job; the death of this process or of its run leaves it, and the next run of the same identity
    waits for it. A job that the scheduler ended, or that stopped in order at its time limit, is submitted again.
    """

    settings: str = Field(description="The launcher's settings as JSON.")
    files_lag_s: float = Field(
        default=10.0, ge=0, description="Seconds in which the shared file system shows what an ended job has written."
    )

    @cached_property
    def spec(self) -> SchedulerLauncherSpec:
        spec = parse_launcher(json.loads(self.settings), "launcher")
        assert isinstance(spec, SchedulerLauncherSpec)
        return spec

    @cached_property
    def scheduler(self) -> Scheduler:
        return make_scheduler(self.spec)

    def prepare(self, context: dg.AssetExecutionContext, job: TorchJob, folder: Path) -> PreparedFiles:
        """Claim the job: return the files of the one that runs already, or new ones."""
        identity = job.identity
        if identity is None:
            files = RunDir.create(folder, context.run.run_id, context.retry_number)
            identity = JobIdentity(f"{NAME_PREFIX}{uuid4().hex}", files.path / CLAIM)
        owner = RunProcess.of(context.run.run_id, os.getpid())
        adoption = Adoption(
            scheduler=self.scheduler,
            spec=self.spec,
            owner=owner,
            make_files=lambda: (
                RunDir.create(folder, context.run.run_id, context.retry_number)
                if job.identity is not None
                else RunDir(identity.claim.parent)
            ),
            warn=context.log.info,
        )
        files = adoption.obtain_claim(identity).files
        context.instance.add_run_tags(context.run.run_id, {f"{JOB_TAG}{identity.name}": str(identity.claim)})
        bookmark = Bookmark(files.path / "messages.shown")
        return PreparedFiles(files, JobMessages(files.messages, bookmark), Bookmark(files.path / "log.shown"))

    def submit(self, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> ScheduledJob:
        """Submit the job of a claim, or take it if it was submitted already.

        Raises:
            ConfigError: the scheduler refuses it.
            LauncherError: the scheduler cannot be reached.
        """
        path = run_dir.path / CLAIM if job.identity is None else job.identity.claim
        claim = JobClaim.read(path)
        if claim is None or claim.files.path != run_dir.path:
            raise LauncherError(f"{path}: another process has taken this job's claim: run it again")
        identity = job.identity or JobIdentity(claim.name, path)
        progress, copies = _list_progress(identity), CopyWatch(self.files_lag_s)
        if claim.job_id is not None:
            return ScheduledJob(claim.job_id, job, identity, env, claim.files, claim.owner, progress, copies)
        try:
            job_id = self._create(job, identity, env, run_dir)
        except BaseException:
            claim.drop(path)
            raise
        claim.of_job(job_id).publish(path)
        return ScheduledJob(job_id, job, identity, env, run_dir, claim.owner, progress, copies)

    def poll(self, handle: ScheduledJob) -> JobStatus:
        """Return the job's state, asked of the scheduler every `poll_interval_s` seconds; submit it again if it was lost."""
        now = time.monotonic()
        if handle.status.state.is_final or now - handle.looked_at < self.spec.poll_interval_s:
            return handle.status
        handle.looked_at = now
        try:
            seen = self.scheduler.look(handle.id)
        except LauncherError as error:
            self._note_silence(handle, error)
            return handle.status
        handle.unseen_since = None
        if seen is not None and seen.dead:
            seen = self._tend_copies(handle, seen)
            if handle.status.state.is_final:
                return handle.status
        if seen is not None and not seen.state.is_final:
            self._note_reason(handle, seen)
            handle.status = JobStatus(seen.state, None, seen.reason)
        else:
            handle.status = self._settle_status(handle, seen)
        return handle.status

    def cancel(self, handle: ScheduledJob) -> None:
        """End the job and wait for its processes; leave it if the process of the run has died, for the next run."""
        log = dg.get_dagster_logger()
        if has_run_process_ended():
            log.warning(f"the process of this run has ended: job {handle.id} goes on, and the next run waits for it")
            return
        handle.was_cancelled = True
        try:
            self.scheduler.end(handle.id, self.spec.grace_s)
        except LauncherError as error:
            log.error(f"job {handle.id} could not be ended, and may still run: {error}")
            return
        self.settle(handle)

    def settle(self, handle: ScheduledJob) -> None:
        """Remove the claim of a job that has ended, unless another process waits for the job too, which then does."""
        claim = JobClaim.read(handle.identity.claim)
        if claim is None or claim.owner != handle.owner:
            return
        if claim.name == handle.identity.name and claim.job_id == handle.id:
            claim.drop(handle.identity.claim)

    def describe(self, handle: ScheduledJob) -> dict[str, str | int]:
        again = {} if handle.files.submission == 1 else {"submissions": handle.files.submission}
        return {"engine": self.scheduler.engine, "job": handle.id, **again}

    def get_limits(self, handle: ScheduledJob) -> JobLimits:
        """Return the limits; that of the whole time is the scheduler's affair."""
        return JobLimits(self.spec.stall_limit_s, None, min(self.spec.poll_interval_s, 1.0))

    def locate_files(self, handle: ScheduledJob, files: RunDir) -> RunDir:
        return handle.files

    def has_arrays(self, spec: LauncherSpec) -> bool:
        return self.scheduler.has_arrays

    def _create(
        self, job: TorchJob, identity: JobIdentity, env: Mapping[str, str], files: RunDir, again: bool = False
    ) -> str:
        token = write_folder_token(files.path)
        env = {**env, **make_error_environment(files), **token.to_env()}
        fewest = self.spec.least_nodes if again and self.spec.least_nodes < job.nodes else None
        return self.scheduler.create(JobRequest(identity.name, job, env, files, identity.claim, fewest))

    def _tend_copies(self, handle: ScheduledJob, seen: SeenJob) -> SeenJob:
        """Start dead copies again, or end all and set the status if one has failed; return the job as it is then."""
        verdict = handle.copies.judge(seen, handle.files)
        if verdict.failure:
            self.scheduler.end(handle.id, self.spec.grace_s)
            handle.status = JobStatus(JobState.FAILED, None, verdict.failure)
        log = dg.get_dagster_logger()
        for copy in verdict.restart:
            try:
                self.scheduler.restart(handle.id, copy)
                log.warning(f"copy {copy} of job {handle.id} has died, and is started again")
            except LauncherError as error:
                log.warning(f"copy {copy} of job {handle.id} has died, and the others do its work: {error}")
        return replace(seen, state=JobState.RUNNING) if verdict.restart or verdict.is_open else seen

    def _settle_status(self, handle: ScheduledJob, seen: SeenJob | None) -> JobStatus:
        """Return the outcome of a job that has ended, or that the scheduler does not know any more."""
        reason = "the scheduler does not know it any more" if seen is None else seen.reason
        if handle.job.copies > 1 and seen is not None and seen.state is JobState.SUCCEEDED:
            return JobStatus(JobState.SUCCEEDED, None, reason)  # copies send no report
        if has_ended_unheard(seen, handle.files):
            return JobStatus(JobState.SUCCEEDED, None, reason)
        failed = self._wait_for_failure(handle.files)
        if not failed and has_report(handle.files.messages):
            return JobStatus(JobState.SUCCEEDED, None, reason)
        lost = seen is None or seen.lost
        if handle.was_cancelled or seen is not None and seen.state is JobState.CANCELLED and not lost:
            return JobStatus(JobState.CANCELLED, None, reason)  # by us, or in the scheduler by hand
        # Ranks whose peers were lost with a node leave errors of their connections.
        if is_interrupted(handle.files) or lost and not is_user_error(handle.files):
            return self._submit_again(handle, reason)
        if seen is None or failed:
            return JobStatus(JobState.FAILED, None, reason)
        if not handle.files.ranks.exists():
            unseen = f"none of its processes has used the folder {handle.files.path}, which every node has to mount"
            reason = f"{reason}; {unseen}" if reason else unseen
        return JobStatus(seen.state, None, reason)

    def _wait_for_failure(self, files: RunDir) -> bool:
        """Whether a rank of an ended job left an error. A shared file system may show that late, as it may the report."""
        deadline = time.monotonic() + self.files_lag_s
        while not (failed := has_failure_message(files)) and not has_report(files.messages):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_INTERVAL_S)
        return failed

    def _submit_again(self, handle: ScheduledJob, reason: str) -> JobStatus:
        """Submit a job again that did not end by itself, unless that has been in vain too often.

        Of several processes that wait for it, the one that claimed it last does that, and the others follow. A scheduler
        that does not answer is asked again at the next polls, for some minutes.
        """
        claim = JobClaim.read(handle.identity.claim)
        if claim is None or claim.name != handle.identity.name:
            return JobStatus(JobState.FAILED, None, f"{reason}; its claim is gone")
        is_elsewhere = claim.job_id not in (None, handle.id)
        if claim.owner != handle.owner and (is_elsewhere or not _may_take_over(claim)):
            handle.id, handle.files = claim.job_id or handle.id, claim.files if claim.job_id else handle.files
            return JobStatus(JobState.PENDING)
        progress = _list_progress(handle.identity)
        fruitless = 1 if progress != handle.progress else handle.fruitless + 1
        if fruitless > MAX_FRUITLESS:
            words = f"ended {MAX_FRUITLESS} times without a new checkpoint between: {reason}"
            return JobStatus(JobState.FAILED, None, words)
        is_begun = claim.job_id is None  # by a try that had no answer, or whose process died
        files = claim.files if is_begun else handle.files.next_submission()
        again = replace(claim, files=files, job_id=None, owner=handle.owner, written=time.time())
        again.publish(handle.identity.claim)
        try:
            created = self.scheduler.find(handle.identity.name) if is_begun else None
            new_id = handle.id if created is None else created.id
            if new_id == handle.id:
                new_id = self._create(handle.job, handle.identity, handle.env, files, again=True)
        except LauncherError as error:
            handle.unsubmitted_since = handle.unsubmitted_since or time.monotonic()
            if time.monotonic() - handle.unsubmitted_since > _UNSEEN_OWNER_S:
                raise
            self._note_silence(handle, error)
            return JobStatus(JobState.PENDING, None, reason)
        again.of_job(new_id).publish(handle.identity.claim)
        before, handle.id = handle.id, new_id
        handle.fruitless, handle.progress, handle.unsubmitted_since = fruitless, progress, None
        handle.files, handle.reason = files, ""
        dg.get_dagster_logger().warning(
            f"job {before} has ended early ({reason}): it is submitted again as {handle.id}"
        )
        return JobStatus(JobState.PENDING)

    def _note_reason(self, handle: ScheduledJob, seen: SeenJob) -> None:
        if seen.state is JobState.PENDING and seen.reason != handle.reason:
            dg.get_dagster_logger().info(f"job {seen.id} waits: {seen.reason}")
        handle.reason = seen.reason

    def _note_silence(self, handle: ScheduledJob, error: LauncherError) -> None:
        """Say that the scheduler cannot be asked. The job may well live: its ranks' pulse is watched meanwhile."""
        now = time.monotonic()
        handle.unseen_since = handle.unseen_since or now
        if now - handle.reminded_at > _REMINDER_S:
            handle.reminded_at = now
            silent = f"for {now - handle.unseen_since:.0f} s"
            dg.get_dagster_logger().warning(f"the scheduler cannot be asked about job {handle.id} {silent}: {error}")


def _may_take_over(claim: JobClaim) -> bool:
    """Whether another process's claim is given up. One of another machine has some minutes to see to its job."""
    dead = claim.owner.is_dead()
    return time.time() - claim.written > _UNSEEN_OWNER_S if dead is None else dead


def _list_progress(identity: JobIdentity) -> frozenset[tuple[str, int]]:
    """Return names and sizes of the files from which a job goes on, without claims."""
    found: set[tuple[str, int]] = set()
    for folder in identity.progress:
        with suppress(OSError), os.scandir(folder) as entries:
            for each in entries:
                with suppress(OSError):
                    found.add((each.name, 0 if each.is_dir() else each.stat().st_size))
    return frozenset(each for each in found if each[0] != CLAIM)
