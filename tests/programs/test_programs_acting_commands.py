"""`draftworks decisions`, `accept`, `hold` and `release`, at a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from acting_fleet import ActingFleet
from typer.testing import CliRunner, Result

from draftworks.decision.answers import AnswerFile
from draftworks.decision.record import Choice
from draftworks.programs.cli import app


@pytest.fixture
def acting(tmp_path: Path) -> ActingFleet:
    acting = ActingFleet(tmp_path)
    acting.set_budget(10.0)
    acting.add("one", act="none")
    acting.add("two", Choice.UNDECIDED)
    return acting


def run(acting: ActingFleet, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--registry", str(acting.fleet.registry)])


def say(acting: ActingFleet, *words: str) -> str:
    result = run(acting, *words)
    assert result.exit_code == 0, result.output
    return result.output


def test_an_answer_that_no_budget_lets_start_is_told_so(acting: ActingFleet):
    assert "no budget" not in say(acting, "accept", "one", "eagle3", "--choice", "retrain")
    acting.set_budget(None)
    told = say(acting, "accept", "one", "eagle3", "--choice", "retrain")
    assert "warning: deployment.yaml has no budget, so nothing starts by itself" in told
    assert "draftworks run retrain_eagle3 --target one" in told
    assert "no budget" not in say(acting, "accept", "one", "eagle3", "--choice", "keep")


def refuse(acting: ActingFleet, *words: str) -> str:
    result = run(acting, *words)
    assert result.exit_code == 1
    return result.output


def test_decisions_are_listed_with_what_they_wait_for(acting: ActingFleet):
    said = say(acting, "decisions")
    assert "0 of 10 GPU-hours in 7 days" in said
    assert "a retrain waits for a person" in said
    assert "undecided: measure on more prompts" in said
    assert "daemon" not in said


def test_an_accepted_decision_starts_next(acting: ActingFleet):
    assert "retrain of the eagle3 draft of one is accepted by me" in say(
        acting, "accept", "one", "eagle3", "--who", "me", "--why", "slow"
    )
    said = say(acting, "decisions")
    assert "accepted by me" in said
    assert "while Dagster's daemon runs: draftworks ui" in said
    assert "tune" in say(acting, "accept", "two", "eagle3", "--choice", "tune")


def test_an_answer_that_replaces_another_one_says_so(acting: ActingFleet):
    say(acting, "accept", "one", "eagle3", "--choice", "tune", "--who", "you")
    said = say(acting, "accept", "one", "eagle3", "--choice", "keep")
    assert "the answer before it: tune, by you" in said
    assert "nothing starts" in said
    assert "before it" not in say(acting, "accept", "one", "eagle3", "--choice", "keep")


def test_a_hold_is_shown_until_it_is_released(acting: ActingFleet):
    assert "on hold by me" in say(acting, "hold", "one", "--who", "me", "--why", "a test")
    assert "on hold by me" in say(acting, "decisions")
    assert "nothing starts before draftworks release one" in say(acting, "accept", "one", "eagle3")
    assert "is released" in say(acting, "release", "one")
    assert not AnswerFile(acting.var).read().holds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("accept", "one", "dflash"), "does not use 'dflash'; there is: eagle3"),
        (("accept", "on", "eagle3"), "did you mean one"),
        (("accept", "two", "eagle3"), "undecided"),
        (("accept", "one", "eagle3", "--choice", "undecided"), "expected keep, tune or retrain"),
        (("hold", "on"), "did you mean one"),
        (("release", "one"), "not on hold"),
    ],
    ids=range(6),
)
def test_what_makes_no_sense_is_refused_and_nothing_is_recorded(acting: ActingFleet, words: tuple[str, ...], said: str):
    assert said in refuse(acting, *words)
    assert not AnswerFile(acting.var).path.exists()
