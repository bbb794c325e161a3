"""The record of a decision: round trip, what is refused, and what is kept of earlier ones."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kill_points import killed_before

from draftworks.decision.record import (
    Choice,
    Costs,
    Decision,
    EvalLoss,
    Margins,
    Reference,
    find_decision,
    read_decision_history,
    save_decision,
)
from draftworks.errors import StoreError

FIGURE = EvalLoss("heldout", Choice.TUNE, Reference.FORMER_FIGURE, "a", 2.4, 2.5, 0.1, 0.06, 0.14, 80, 64, None, "why")
DECISION = Decision(
    target="small",
    strategy="eagle3",
    choice=Choice.TUNE,
    draft="0123abcd",
    target_digest="4567",
    subject="89ab",
    figures=(FIGURE, EvalLoss("code", Choice.KEEP, Reference.NONE, reason="was not measured on it")),
    reasons=("heldout: lost 0.100",),
    margins=Margins(0.05, 0.15, 20),
    costs=Costs(tune=1.5),
    after_tune=None,
    when="2026-05-01T12:00:00+00:00",
)


def change(values: Any, path: str, value: Any) -> Any:
    *parents, last = path.split(".")
    inner = values
    for name in parents:
        inner = inner[int(name) if name.isdecimal() else name]
    inner[last] = value
    return values


def test_what_is_saved_is_read_again(tmp_path: Path):
    saved = save_decision(tmp_path, DECISION)
    assert saved == replace(DECISION, number=1) == find_decision(tmp_path, "small", "eagle3")
    assert find_decision(tmp_path, "small", "dflash") is None
    assert find_decision(tmp_path, "other", "eagle3") is None
    assert saved.largest_loss == 0.1


def test_equal_facts_are_told_once_and_earlier_decisions_are_kept(tmp_path: Path):
    first = save_decision(tmp_path, DECISION)
    assert save_decision(tmp_path, replace(DECISION, when="2026-06-01T12:00:00+00:00")) == first
    second = save_decision(tmp_path, replace(DECISION, subject="other"))
    third = save_decision(tmp_path, replace(DECISION, subject="other", choice=Choice.RETRAIN, after_tune="f"))
    assert [one.number for one in (first, second, third)] == [1, 2, 3]
    assert read_decision_history(tmp_path, "small", "eagle3") == [first, second, third]
    assert read_decision_history(tmp_path, "small", "dflash") == []


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("schema", 2, "expected schema 1, found 2"),
        ("choice", "drop", "choice"),
        ("draft", "../up", "not a name"),
        ("after_tune", "/etc", "not a name"),
        ("when", "2026-05-01T12:00:00", "no time zone"),
        ("when", "yesterday", "not a decision"),
        ("number", 0, "expected 1 or more"),
        ("number", -1, "number"),
        ("number", "1", "number"),
        ("margins", {}, "margins"),
        ("costs.tune", -1.0, "costs"),
        ("figures", {}, "figures"),
        ("figures.0.loss", "much", r"figures\.0\.loss"),
        ("figures.0.loss", float("inf"), r"figures\.0\.loss"),
        ("figures.0.low", float("nan"), r"figures\.0\.low"),
        ("figures.0.prompts", 1.5, "prompts"),
        ("figures.0.reference", "best", "reference"),
        ("more", 1, "more"),
        ("target", "other", "about other, eagle3: was the file copied"),
        ("target", ["small"], "target"),
    ],
)
def test_a_damaged_record_is_one_clear_error(tmp_path: Path, path: str, value: Any, match: str):
    save_decision(tmp_path, DECISION)
    file = tmp_path / "decisions/small/eagle3/decision.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()), path, value)))
    before = file.read_bytes()
    with pytest.raises(StoreError, match=match) as error:
        find_decision(tmp_path, "small", "eagle3")
    assert str(file) in str(error.value)
    assert len(str(error.value)) < 1000
    with pytest.raises(StoreError):
        save_decision(tmp_path, DECISION)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b"\xff", b'"' + b"x" * 100, b"[" * 100_000])
def test_hostile_files_are_one_clear_error(tmp_path: Path, content: bytes):
    folder = tmp_path / "decisions/small/eagle3"
    folder.mkdir(parents=True)
    (folder / "decision.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"decision\.json"):
        find_decision(tmp_path, "small", "eagle3")


def test_names_that_leave_the_folder_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="not a name"):
        find_decision(tmp_path, "..", "eagle3")


def _save(var: Path, subject: str) -> None:
    for index in range(5):
        save_decision(var, replace(DECISION, subject=f"{subject}{index}"))


def test_writers_at_once_leave_every_decision_once(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_save, args=(tmp_path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    history = read_decision_history(tmp_path, "small", "eagle3")
    assert [one.number for one in history] == list(range(1, 11))
    assert sorted(one.subject for one in history) == [f"{name}{index}" for name in "ab" for index in range(5)]


def test_a_kill_leaves_one_whole_decision_and_the_next_save_goes_on(tmp_path: Path):
    """At every change of the file system: the newest one is the former or the new one, and no number is lost or given twice."""
    second = replace(DECISION, subject="cdef", choice=Choice.RETRAIN)
    for event in itertools.count():
        var = tmp_path / str(event)
        first = save_decision(var, DECISION)
        killed = killed_before(event, lambda var=var: save_decision(var, second))
        assert find_decision(var, "small", "eagle3") in (first, replace(second, number=2))
        saved = save_decision(var, second)
        assert read_decision_history(var, "small", "eagle3") == [first, saved]
        assert saved == replace(second, number=2)
        if not killed:
            break
    assert event > 10
