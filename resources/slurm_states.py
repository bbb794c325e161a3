"""What Slurm's records say of a job, one record for a plain job and one for each element of an array."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resources.scheduler import DeadCopy, SeenJob
from resources.slurm_commands import SlurmRecord
from resources.slurm_script import LOST_NODE_EXIT, STOPPED_EXIT
from resources.torch_job import JobState

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
    """Return what the records of one job say.

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
