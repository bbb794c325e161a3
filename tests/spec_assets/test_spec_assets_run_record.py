"""A run whose record was marked as finished from outside ends its own process."""

from __future__ import annotations

import shutil
import threading

import dagster as dg
import pytest
from processes import ending
from test_spec_assets_command_line import ROOT
from test_spec_assets_killed_run import commands_of, start
from waiting import HANG_S, wait_until

from spec_assets.executor import end_with_record


class Storage:
    """Returns one run after the other; None stands for a deleted run, an error for an unreachable storage."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def get_run_by_id(self, run_id: str) -> object:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def run_that(status: dg.DagsterRunStatus) -> dg.DagsterRun:
    return dg.DagsterRun("j", status=status)


STARTED = run_that(dg.DagsterRunStatus.STARTED)


@pytest.mark.parametrize("last", [run_that(dg.DagsterRunStatus.CANCELED), run_that(dg.DagsterRunStatus.FAILURE), None])
def test_a_record_that_is_over_ends_the_run_once(last: dg.DagsterRun | None) -> None:
    calls, ended = [], threading.Event()

    def end() -> None:
        calls.append(1)
        ended.set()

    with end_with_record(Storage(STARTED, OSError("locked"), last), "r", end, every_s=0.01):
        assert ended.wait(HANG_S)
    assert calls == [1]


def test_a_run_that_goes_on_is_left_alone() -> None:
    storage, looked = Storage(STARTED), threading.Event()
    storage.get_run_by_id = lambda run_id: looked.set() or STARTED
    with end_with_record(storage, "r", lambda: pytest.fail("ended"), every_s=0.01):
        assert looked.wait(HANG_S)


@pytest.mark.slow
def test_a_forced_termination_of_a_run_that_nobody_reaches_leaves_no_process(site) -> None:
    site.write_chats(20)
    home = site.root / "dagster_home"
    home.mkdir()
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", home)
    started = start(site, home, "job", "execute", "-j", "prepare", "--tags", '{"dagster/partition": "small"}')
    with ending(started):
        wait_until(
            lambda: any("programs.regenerate" in command for command in commands_of(home)),
            possible=lambda: started.poll() is None,
        )

        with dg.DagsterInstance.from_config(str(home)) as instance:
            (run,) = instance.get_runs()
            instance.report_run_canceled(run)
            assert started.wait() != 0
            wait_until(lambda: commands_of(home) == [], lambda: f"the end of {commands_of(home)}")
            assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.CANCELED
