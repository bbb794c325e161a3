"""dagster Failures of jobs, from the error files of their ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import Any

import dagster as dg

from draftworks.programs.failure import LESS_MEMORY, RankFailure
from draftworks.programs.heartbeat import HeartbeatRecord
from resources.job_messages import TAIL_LINES, read_last_lines
from resources.torch_job import JobStatus, RunDir, TorchJob

_KILLED = {-9, 128 + 9}
"""Exit codes of a process that SIGKILL ended, and of a shell whose process it ended."""
_SILENT_DEATH = re.compile(
    r"failed \(exitcode: -(?P<signal>\d+)\) local_rank: (?P<local_rank>\d+) \(pid: (?P<pid>\d+)\)"
)
"""torchrun's words on the rank that it saw fail first, if a signal ended it."""
_MOST_LINES = 500
"""Of the log's end that are searched."""


def describe_job_failure(job: TorchJob, files: RunDir, status: JobStatus, metadata: Mapping[str, Any]) -> dg.Failure:
    """Return the failure of a job that exited with an error.

    Its description is the first failed rank's message with the traceback; for a user's error the message alone, and no
    retries; if no rank left an error file (killed, or died before it could), the last lines of the log. Where a signal
    ended one rank, and the others failed because of it, that comes before their message.
    """
    metadata = {**metadata, "state": status.state.value}
    if status.exit_code is not None:
        metadata["exit_code"] = status.exit_code
    if status.reason:
        metadata["scheduler_says"] = status.reason
    ranks = sorted(_read_failures(files), key=lambda failure: failure.time_ns)
    if not ranks:
        killed = f" {LESS_MEMORY}." if status.exit_code in _KILLED else ""
        description = (
            f"{job.module} {_describe_ending(status)} and no rank left an error message.{killed} The last lines of "
            f"{files.log}:"
        )
        return dg.Failure(f"{description}\n{_read_last_words(files)}", metadata)
    first = ranks[0]
    metadata["failed_ranks"] = "\n".join(_format_headline(failure) for failure in ranks)
    if first.interrupted:
        return dg.Failure(f"{first.message}. Run it again: it continues from there.", metadata)
    if first.user_error:
        return dg.Failure(first.message, metadata, allow_retries=False)
    died = _describe_silent_death(files)
    return dg.Failure(f"{died}{_format_headline(first)}\n\n{first.traceback}", metadata)


def _describe_silent_death(files: RunDir) -> str:
    """Return what is known of a rank that a signal ended before all others failed, and a blank line; else nothing."""
    lines = read_last_lines(files.log, _MOST_LINES)
    found = next((match for line in lines if (match := _SILENT_DEATH.search(line))), None)
    if found is None:
        return ""
    number = int(found["signal"])
    name = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
    said = [f"local rank {found['local_rank']} (pid {found['pid']}) was ended by signal {number}{name}."]
    if -number in _KILLED:
        said.append(f"{LESS_MEMORY}.")
    after = dropwhile(lambda line: not line.startswith("Fatal Python error"), lines)
    current = dropwhile(lambda line: not line.startswith("Current thread"), after)
    return "\n".join([" ".join(said), *takewhile(str.strip, current), "What another rank said of it:", "", ""])


def is_interrupted(files: RunDir) -> bool:
    """Whether the first rank that ended early did so in order after a signal, so that the job can go on from there."""
    ranks = sorted(_read_failures(files), key=lambda failure: failure.time_ns)
    return bool(ranks) and ranks[0].interrupted


def read_interruption(files: RunDir) -> str:
    """Return the message of the first interrupted rank, such as which step is saved; empty if no rank left one."""
    ranks = sorted(_read_failures(files), key=lambda failure: failure.time_ns)
    return next((failure.message for failure in ranks if failure.interrupted), "")


def describe_missing_report(job: TorchJob, reports: int, metadata: Mapping[str, Any]) -> dg.Failure:
    """Return the failure of a job that exited 0 but did not send exactly one report."""
    found = "without a report" if reports == 0 else f"after {reports} reports"
    return dg.Failure(
        f"{job.module} exited 0 {found}, but exactly one is expected: rank 0 sends it, once, when its work is complete.",
        metadata,
        allow_retries=False,
    )


def describe_time_limit(job: TorchJob, limit_s: float, metadata: Mapping[str, Any]) -> dg.Failure:
    """Return the failure of a job that was cancelled at its time limit."""
    return dg.Failure(
        f"{job.module} ran over its time limit of {limit_s:g} s and was cancelled. Raise the limit, or give it"
        " less to do.",
        metadata,
        allow_retries=False,
    )


def describe_stall(
    job: TorchJob,
    files: RunDir,
    limit_s: float,
    ranks: Sequence[tuple[HeartbeatRecord, str]],
    metadata: Mapping[str, Any],
) -> dg.Failure:
    """Return the failure of a job that was ended because it made no progress. `ranks` are pairs of last pulse and
    process state."""
    places = [
        f"rank {pulse.rank} (pid {pulse.pid}, {state}), which last reported: {pulse.said}\n  "
        + "\n  ".join(pulse.where or ("(place unknown)",))
        for pulse, state in ranks
        if not pulse.ended
    ]
    who = "\n".join(places) or ("(all ranks have ended, torchrun has not)" if ranks else "(no rank has begun)")
    return dg.Failure(
        f"{job.module} made no progress for {limit_s:g} s (launcher.stall_limit_s) and was ended. Its ranks, the"
        f" most suspicious first:\n{who}\nThe stacks of the ranks that answered are at the end of {files.log}. Run it again:"
        " a training continues from its last checkpoint, other programs from their stored results.",
        metadata,
    )


def has_failure_message(files: RunDir) -> bool:
    """Whether a rank left an error message; a process that was killed leaves none."""
    return bool(_read_failures(files))


def is_user_error(files: RunDir) -> bool:
    """Whether the first failed rank left an error that only a user can mend, so that doing it again is in vain."""
    ranks = sorted(_read_failures(files), key=lambda failure: failure.time_ns)
    return bool(ranks) and ranks[0].user_error


def _read_failures(files: RunDir) -> list[RankFailure]:
    """Return the failures of all ranks; that of torchrun if no rank left one."""
    ranks = [RankFailure.read(path) for path in files.ranks.rglob("error.json")]
    return [failure for failure in ranks or [RankFailure.read(files.error)] if failure is not None]


def _read_last_words(files: RunDir) -> str:
    """Return the end of the log up to torchrun's line on the failed rank, without torchrun's own long traceback."""
    lines = read_last_lines(files.log, 10 * TAIL_LINES)
    verdict = next((number for number, line in enumerate(lines) if "failed (exitcode: " in line), len(lines))
    return "\n".join(lines[: verdict + 1][-TAIL_LINES:]) or "(it printed nothing)"


def _format_headline(failure: RankFailure) -> str:
    return failure.message if failure.rank is None else f"rank {failure.rank}: {failure.message}"


def _describe_ending(status: JobStatus) -> str:
    code = status.exit_code
    if code is None:
        ending = status.state.value
    else:
        ending = f"exited with code {code}" if code >= 0 else f"was ended by signal {-code}"
    return f"{ending} ({status.reason})" if status.reason else ending
