"""What Slurm's records say of plain jobs and of arrays."""

from __future__ import annotations

import pytest

from resources.scheduler import DeadCopy
from resources.slurm_commands import SlurmRecord
from resources.slurm_scheduler import describe_records, find_hopeless, is_final
from resources.slurm_script import LOST_NODE_EXIT
from resources.torch_job import JobState


def record(
    state: str, copy: int | None = None, exit_code: int = 0, reason: str = "", restarts: str = "0"
) -> SlurmRecord:
    return SlurmRecord("7", "dw-1", state, exit_code, reason, "/claim", copy, restarts)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["COMPLETED", "RUNNING", "PENDING"], JobState.RUNNING),
        (["COMPLETED", "FAILED", "PENDING"], JobState.PENDING),
        (["COMPLETED", "FAILED", "CANCELLED"], JobState.FAILED),
        (["COMPLETED", "COMPLETED"], JobState.SUCCEEDED),
        (["COMPLETED", "CANCELLED"], JobState.SUCCEEDED),
        (["CANCELLED", "CANCELLED"], JobState.CANCELLED),
    ],
)
def test_an_array_has_ended_when_all_its_elements_have(states: list[str], expected: JobState):
    seen = describe_records([record(state, copy) for copy, state in enumerate(states)])
    assert (seen.id, seen.state) == ("7", expected)


def test_dead_elements_are_named_with_their_life():
    elements = [
        record("RUNNING", 0),
        record("FAILED", 1, 9, restarts="2"),
        record("NODE_FAIL", 2),
        record("COMPLETED", 3),
    ]
    assert describe_records(elements).dead == (DeadCopy(1, "2"), DeadCopy(2, "0", lost=True))
    assert describe_records([record("CANCELLED", 0), record("RUNNING", 1)]).dead == ()


def test_an_array_is_lost_if_slurm_ended_all_that_died():
    lost = [record("PREEMPTED", 0), record("FAILED", 1, LOST_NODE_EXIT), record("COMPLETED", 2)]
    assert describe_records(lost).lost
    assert not describe_records([*lost, record("FAILED", 3, 1)]).lost


def test_a_plain_job_has_no_copies():
    seen = describe_records([record("FAILED", exit_code=3)])
    assert (seen.state, seen.reason, seen.dead) == (JobState.FAILED, "exit code 3 of the job's script", ())


def test_what_can_never_start_is_found_in_any_element():
    assert find_hopeless([record("RUNNING", 0), record("PENDING", 1, reason="BadConstraints")]) == "BadConstraints"
    assert find_hopeless([record("PENDING", 1, reason="Resources")]) == ""
    assert is_final(record("TIMEOUT"))
    assert not is_final(record("REQUEUED"))
