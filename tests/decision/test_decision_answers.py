"""People's answers and holds: recorded with who, when and why, whole wherever a process is killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from decision_toys import NOW, decided
from kill_points import killed_before

from draftworks.decision.record import AnswerFile, Choice, save_decision
from draftworks.errors import StoreError

MAX_CHANGES = 200


def test_an_answer_is_to_the_newest_decision(tmp_path: Path):
    file = AnswerFile(tmp_path)
    with pytest.raises(StoreError, match="no decision to answer"):
        file.accept("small", "eagle3", None, "me", "", NOW)
    decision = save_decision(tmp_path, decided())
    given = file.accept("small", "eagle3", None, "me", "it is slow", NOW)
    assert (given.choice, given.subject) == (Choice.RETRAIN, "subject")
    assert file.read().find(decision) == given
    assert file.read().find(save_decision(tmp_path, decided(subject="new"))) is None
    assert file.accept("small", "eagle3", Choice.KEEP, "me", "", NOW).choice is Choice.KEEP
    assert "by me at 2027-01-15 08:00 UTC: it is slow" in given.describe()


def test_an_undecided_one_needs_a_choice(tmp_path: Path):
    file = AnswerFile(tmp_path)
    save_decision(tmp_path, decided(choice=Choice.UNDECIDED))
    for choice in (None, Choice.UNDECIDED):
        with pytest.raises(StoreError, match="--choice keep, tune or retrain"):
            file.accept("small", "eagle3", choice, "me", "", NOW)
    assert not file.read().given
    assert file.accept("small", "eagle3", Choice.TUNE, "me", "", NOW).choice is Choice.TUNE


def test_a_hold_lasts_until_it_is_released(tmp_path: Path):
    file = AnswerFile(tmp_path)
    first = file.hold("small", "me", "a test", NOW)
    assert file.hold("small", "you", "another", NOW + 1) == first
    assert file.read().holds == {"small": first}
    file.release("small", "you", "done", NOW + 2)
    assert not file.read().holds
    with pytest.raises(StoreError, match="not on hold"):
        file.release("small", "you", "again", NOW + 3)
    assert file.path.read_text().count("\n") == 2


def test_killed_at_any_change_of_the_file_system_an_answer_is_there_or_not(tmp_path: Path):
    found = []
    for event in range(MAX_CHANGES):
        file = AnswerFile(tmp_path / str(event))
        decision = save_decision(file.var, decided())
        killed = killed_before(event, partial(file.accept, "small", "eagle3", None, "me", "", NOW))
        found.append(file.read().find(decision) is not None)
        file.accept("small", "eagle3", Choice.TUNE, "me", "", NOW)
        answer = file.read().find(decision)
        assert answer is not None
        assert answer.choice is Choice.TUNE
        if not killed:
            break
    assert not killed
    assert found == sorted(found)
    assert found[-1]
