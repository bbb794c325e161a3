"""Events from the records of drafts in service and of decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from notification_toys import Desk, webhook
from service_toys import STRATEGY, TARGET, record, served

from draftworks.decision.record import AnswerFile, Choice, Costs, Decision, Margins, save_decision
from draftworks.errors import StoreError
from draftworks.notifications.outbox import FILE, find_bookmark
from draftworks.service.register import Canary, InService, ServiceRegister

DECISION = Decision(
    target=TARGET,
    strategy=STRATEGY,
    choice=Choice.KEEP,
    draft="0123abcd",
    target_digest="4567",
    subject="0",
    figures=(),
    reasons=("heldout: lost 0.100",),
    margins=Margins(0.05, 0.15, 20),
    costs=Costs(tune=1.5),
    after_tune=None,
    when="2026-05-01T12:00:00+00:00",
)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, [webhook(max_messages=50)])


def put(desk: Desk, made: InService) -> None:
    register = ServiceRegister(desk.var, made.target, made.strategy)
    current = register.find()
    register.replace(None if current is None else current.draft.digest, lambda _: made)


def list_told(desk: Desk) -> list[str]:
    return [f"{event['kind']}: {event['title']}" for each in desk.told.messages for event in each["body"]["events"]]


def test_what_was_before_the_first_look_is_not_told_and_what_comes_after_is(desk: Desk) -> None:
    put(desk, record(1, "a"))
    save_decision(desk.var, replace(DECISION, choice=Choice.TUNE))
    assert desk.tick() is None
    assert desk.tick() == 0
    put(desk, record(2, "b"))
    put(desk, replace(record(3, "a"), action="rollback", previous="b"))
    assert desk.tick() == 2
    assert desk.tick() == 0
    assert list_told(desk) == [
        "promotion: eagle3: draft b is in service, before it before",
        "rollback: eagle3: draft a is in service, before it b",
    ]
    assert "by me: why" in desk.told.messages[0]["body"]["text"]


def test_a_canary_and_its_end_are_told(desk: Desk) -> None:
    desk.tick()
    put(desk, record(1, "a"))
    put(desk, replace(record(2, "a"), action="canary", canary=Canary(served("b"), 0.1)))
    put(desk, replace(record(3, "a"), action="end_canary", forced=True))
    desk.tick()
    assert list_told(desk)[1:] == [
        "promotion: eagle3: canary b gets 10% beside a",
        "rollback: eagle3: canary ended, draft a is in service",
    ]


def test_a_decision_to_keep_is_news_only_after_another(desk: Desk) -> None:
    desk.tick()
    for number, choice in enumerate((Choice.KEEP, Choice.KEEP, Choice.TUNE, Choice.TUNE, Choice.KEEP, Choice.KEEP)):
        save_decision(desk.var, replace(DECISION, subject=str(number), choice=choice))
    desk.tick()
    assert [line.partition(", draft")[0] for line in list_told(desk)] == [
        *["decision: eagle3: tune"] * 2,
        "decision: eagle3: keep",
    ]
    text = desk.told.messages[0]["body"]["text"]
    assert "heldout: lost 0.100\ntune: about 1.5 GPU-hours\nto answer: draftworks accept small eagle3" in text


def test_holds_and_their_ends_are_told_and_answers_are_not(desk: Desk) -> None:
    people = AnswerFile(desk.var)
    people.hold("early", "me", "", 1.0)
    desk.tick()
    save_decision(desk.var, replace(DECISION, choice=Choice.TUNE))
    people.hold(TARGET, "me", "the data moves", 1_700_000_000.0)
    people.accept(TARGET, STRATEGY, None, "me", "", 1_700_000_001.0)
    desk.tick()
    people.release(TARGET, "you", "", 1_700_000_002.0)
    desk.tick()
    assert [line for line in list_told(desk) if line.startswith("hold")] == [
        "hold: on hold: no decision starts anything",
        "hold: released",
    ]
    assert any("by me at 2023-11-14 22:13 UTC: the data moves" in each["body"]["text"] for each in desk.told.messages)
    people.path.write_text("{}\n")
    assert desk.tick() == 0
    assert "on hold" in desk.warnings[0]


def test_a_damaged_record_is_a_warning_and_the_others_are_told(desk: Desk) -> None:
    desk.tick()
    put(desk, record(1, "a"))
    put(desk, replace(record(1, "a"), target="other"))
    path = ServiceRegister(desk.var, "other", STRATEGY).folder / "in_service.json"
    whole = path.read_text()
    path.write_text("{")
    assert desk.tick() == 1
    assert "other, eagle3" in desk.warnings[0]
    path.write_text(whole)
    assert desk.tick() == 1


def test_records_that_begin_anew_are_told(desk: Desk) -> None:
    desk.tick()
    for number in (1, 2):
        put(desk, record(number, str(number)))
    desk.tick()
    folder = ServiceRegister(desk.var, TARGET, STRATEGY).folder
    for path in [*folder.glob("history/*"), folder / "in_service.json"]:
        path.unlink()
    put(desk, replace(record(1, "c"), when="2026-06-01T12:00:00+00:00"))
    assert desk.tick() == 1


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"service": {"a": 1}, "decisions": {}, "people": {}}'])
def test_a_damaged_bookmark_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "notifications").mkdir()
    (tmp_path / "notifications" / FILE).write_text(content)
    with pytest.raises(StoreError, match="looked_through"):
        find_bookmark(tmp_path)
