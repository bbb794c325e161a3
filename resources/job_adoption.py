"""Finds the job that a claim file names, or takes the claim for a new one: one job, once, whoever starts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftworks.config.launchers import LauncherSpec
from resources.job_claims import JobClaim, end_claimed_job, remove_damaged_claim
from resources.job_failure import has_failure_message
from resources.job_messages import has_report
from resources.process_tree import RunProcess
from resources.scheduler import Scheduler, SeenJob
from resources.torch_job import JobIdentity, JobState, RunDir

_LOOK_INTERVAL_S = 0.5
_UNSEEN_OWNER_S = 60.0
"""Seconds in which a process of another machine, which cannot be looked at, completes a claim or has died."""


@dataclass(frozen=True)
class Adoption:
    """The start of a job by one process.

    Attributes:
        make_files: makes the files of a new job.
        warn: called with what is found and done about it.
    """

    scheduler: Scheduler
    spec: LauncherSpec
    owner: RunProcess
    make_files: Callable[[], RunDir]
    warn: Callable[[str], None]

    def obtain_claim(self, identity: JobIdentity) -> JobClaim:
        """Return the claim of this process: with an id, of a job that lives or has left its report; else of a new job.

        Waits while another process that lives is about to submit the job. A job of another name or scheduler, with other
        inputs, is ended first: it writes into the same folder.

        Raises:
            DraftworksError: the scheduler of an earlier job cannot be asked.
        """
        while True:
            claim = JobClaim.read(identity.claim)
            if claim is None:
                taken = self._take(identity)
                if taken is not None:
                    return taken
            elif claim.name != identity.name or claim.launcher.get("kind") != self.spec.kind:
                self._end(identity.claim, claim, "with other inputs")
            elif claim.job_id is None and self._is_being_submitted(claim):
                time.sleep(_LOOK_INTERVAL_S)
            else:
                found = self._adopt(identity, claim)
                if found is not None:
                    return found

    def _take(self, identity: JobIdentity) -> JobClaim | None:
        """Write a claim for a new job; None if another process was faster."""
        remove_damaged_claim(identity.claim)
        stray = self.scheduler.find(identity.name)
        if stray is not None and not stray.state.is_final:
            # Its claim was removed, as by a run that starts over: nobody knows where its files are.
            self.warn(f"job {stray.id} of an earlier run has no claim any more: it is ended")
            self.scheduler.end(stray.id, self.spec.grace_s)
        claim = JobClaim.begin(identity.name, identity.made, self.make_files(), self.owner, self.spec)
        return claim if claim.take(identity.claim) else None

    def _adopt(self, identity: JobIdentity, claim: JobClaim) -> JobClaim | None:
        """Claim the job for this process if it lives, or has ended in order; else remove its claim."""
        seen = claim.look(self.scheduler)
        # One that has ended for this very process is asked for again: it ended before its time.
        is_done = claim.owner != self.owner and has_ended_unheard(seen, claim.files)
        if seen is not None and (not seen.state.is_final or has_report(claim.files.messages) or is_done):
            mine = claim.of_job(seen.id).of_owner(self.owner)
            mine.publish(identity.claim)
            self.warn(f"job {seen.id} of run {claim.owner.run_id[:8]} {_describe(seen)}: it is waited for")
            return mine
        if seen is None and claim.job_id is not None and has_report(claim.files.messages):
            mine = claim.of_owner(self.owner)
            mine.publish(identity.claim)
            return mine
        claim.drop(identity.claim)
        return None

    def _end(self, path: Path, claim: JobClaim, which: str) -> None:
        ended = end_claimed_job(path, self.spec.grace_s)
        if ended is not None:
            self.warn(f"job {ended} of run {claim.owner.run_id[:8]} made the same {which}: it is ended")

    def _is_being_submitted(self, claim: JobClaim) -> bool:
        if claim.owner == self.owner:
            return False  # an earlier attempt of this process, which failed
        dead = claim.owner.is_dead()
        return time.time() - claim.written < _UNSEEN_OWNER_S if dead is None else not dead


def has_ended_unheard(seen: SeenJob | None, files: RunDir) -> bool:
    """Whether a job that sends no messages, as it runs beside another, has ended without an error.

    The file of messages is made by whoever reads them, before the job is submitted.
    """
    ended = seen is not None and seen.state is JobState.SUCCEEDED
    return ended and not files.messages.exists() and not has_failure_message(files)


def _describe(seen: SeenJob) -> str:
    return "has ended meanwhile" if seen.state.is_final else f"is {seen.state.value}"
