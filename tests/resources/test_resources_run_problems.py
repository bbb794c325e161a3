"""The last message of a run: the whole first cause of a failure, or what an interruption saved."""

from __future__ import annotations

import dagster as dg
import pytest
from dagster._core.execution.plan.objects import StepFailureData
from dagster._core.executor.child_process_executor import ChildProcessCrashException
from dagster._utils.error import SerializableErrorInfo

from draftworks.errors import DataError
from resources.run_problems import CRASHED, KEPT, RunProblems


def problems_of(*assets: dg.AssetsDefinition, checks=()) -> RunProblems:
    problems = RunProblems()
    for event in dg.materialize([*assets, *checks], raise_on_error=False).all_events:
        problems.note(event)
    return problems


def note_all(problems: RunProblems, asset: dg.AssetsDefinition) -> None:
    """Note the events of a run of one asset, which may be interrupted."""
    job = dg.Definitions(assets=[asset], jobs=[dg.define_asset_job("all", "*")]).resolve_job_def("all")
    with dg.DagsterInstance.ephemeral() as instance:
        for event in job.execute_in_process(raise_on_error=False, instance=instance).all_events:
            problems.note(event)


@dg.asset
def sound():
    pass


@dg.asset
def described():
    raise dg.Failure("chats.jsonl: expected a key messages, found text. Rename it")


@dg.asset
def unexpected():
    try:
        {}["inner"]
    except KeyError as error:
        raise RuntimeError("around it") from error


@dg.asset
def meant_for_a_person():
    raise DataError("no row of chats.jsonl has a key messages")


def test_a_run_that_succeeds_has_no_cause():
    assert problems_of(sound).describe_failure() is None


def test_our_own_description_is_told_without_a_traceback():
    told = problems_of(described).describe_failure()
    assert told == "described failed: chats.jsonl: expected a key messages, found text. Rename it"
    assert problems_of(meant_for_a_person).describe_failure() == (
        "meant_for_a_person failed: no row of chats.jsonl has a key messages"
    )


def test_an_unexpected_error_ends_with_the_one_that_began_it():
    told = problems_of(unexpected).describe_failure()
    assert told.splitlines()[0] == "unexpected failed: Traceback (most recent call last):"
    assert told.splitlines()[-1] == "KeyError: 'inner'"
    assert "dagster/_core" not in told


def test_of_several_failures_the_first_is_told_last():
    @dg.asset
    def later():
        raise dg.Failure("also bad")

    told = problems_of(described, later).describe_failure()
    first = "described" if told.splitlines()[-1].startswith("described") else "later"
    assert (
        told.splitlines()[0]
        == f"2 steps failed, later than this one: {'later' if first == 'described' else 'described'}"
    )


@pytest.mark.parametrize(
    ("severity", "blocking", "fails"), [("ERROR", True, True), ("ERROR", False, False), ("WARN", True, False)]
)
def test_a_failed_gate_is_told_with_its_description(severity, blocking, fails):
    @dg.asset_check(asset=sound, blocking=blocking)
    def loss_falls():
        return dg.AssetCheckResult(
            passed=False, severity=dg.AssetCheckSeverity[severity], description="loss went from 1.0 to 2.0. Lower lr"
        )

    told = problems_of(sound, checks=[loss_falls]).describe_failure()
    assert (told is not None) == fails
    assert not fails or told.endswith("check loss_falls failed: loss went from 1.0 to 2.0. Lower lr")


def test_an_interrupted_step_is_no_failure_and_says_what_it_saved():
    @dg.asset
    def eagle3_draft():
        raise dg.DagsterExecutionInterruptedError("interrupted by SIGTERM after step 13; its checkpoint is saved")

    problems = RunProblems()
    note_all(problems, eagle3_draft)
    assert problems.describe_failure() is None
    told = problems.describe_interruption()
    assert "eagle3_draft: interrupted by SIGTERM after step 13; its checkpoint is saved. " in told
    assert told.endswith(KEPT)


def crash_of(step: str) -> dg.DagsterEvent:
    """Return the event that Dagster's multiprocess executor yields where a step's process has ended without a result."""
    error = SerializableErrorInfo("", [], CRASHED)
    return dg.DagsterEvent("STEP_FAILURE", "all", step_key=step, event_specific_data=StepFailureData(error, None))


def test_crashes_have_the_name_that_dagster_gives_them():
    assert ChildProcessCrashException.__name__ == CRASHED


def test_an_interrupted_step_whose_process_then_crashes_is_interrupted():
    @dg.asset
    def eagle3_draft():
        raise dg.DagsterExecutionInterruptedError("checkpoint saved")

    problems = RunProblems()
    note_all(problems, eagle3_draft)
    problems.note(crash_of("eagle3_draft"))
    assert problems.describe_failure() is None
    assert problems.describe_crash() == f"interrupted. eagle3_draft: checkpoint saved. {KEPT}"


def test_a_step_whose_process_crashed_is_told_with_how_to_continue():
    problems = RunProblems()
    problems.note(crash_of("killed"))
    told = problems.describe_crash()
    assert told.startswith("the process of killed ended without a result")
    assert told.endswith(KEPT)
