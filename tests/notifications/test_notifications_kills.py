"""A process that looks and tells is killed at any moment: every event is told, and one message at most twice a kill."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from coverings import gate_or_long
from hypothesis import given, settings
from hypothesis import strategies as st
from kill_points import killed_before
from notification_toys import Desk, webhook
from service_toys import STRATEGY, TARGET, record

from draftworks.notifications.outbox import Outbox
from draftworks.service.register import ServiceRegister

PROMOTIONS = 2


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results that were looked at once, and promotions since then."""
    var = tmp_path_factory.mktemp("promoted")
    assert Desk(var, [webhook()]).tick() is None
    register = ServiceRegister(var, TARGET, STRATEGY)
    for number in range(1, PROMOTIONS + 1):
        register.replace(None if number == 1 else str(number - 1), lambda _: record(number, str(number)))  # noqa: B023
    return var


def make_desk(promoted: Path, var: Path, max_messages: int) -> Desk:
    shutil.copytree(promoted, var)
    return Desk(var, [webhook(max_messages=max_messages)])


def count_unrecorded(desk: Desk) -> int:
    """Messages that have arrived, and of which the outbox does not know it."""
    message = Outbox(desk.var, "hook").find_message()
    return 0 if message is None else int({each.id for each in message.events} <= set(desk.told.ids))


# Collected into one, and one each.
@pytest.mark.parametrize("max_messages", gate_or_long([1, 9], [9]))
def test_an_event_is_told_once_unless_a_kill_was_between_send_and_record(
    max_messages: int, promoted: Path, tmp_path: Path
) -> None:
    event, repeats = 0, 0
    while True:
        desk = make_desk(promoted, tmp_path / str(event), max_messages)
        if not killed_before(event, desk.tick):
            break
        unrecorded = count_unrecorded(desk)
        desk.tick()
        ids = desk.told.ids
        assert len(set(ids)) == PROMOTIONS, event
        keys = [message["key"] for message in desk.told.messages]
        assert len(keys) - len(set(keys)) == unrecorded, event
        for message in desk.told.messages:  # a repeated message is the same message
            assert message == desk.told.messages[keys.index(message["key"])]
        repeats += unrecorded
        event += 1
    assert sorted(set(desk.told.ids)) == sorted(desk.told.ids)
    assert event > 20
    assert repeats > 0


@settings(max_examples=8)
@given(kills=st.lists(st.integers(0, 80), max_size=5))
def test_any_schedule_of_kills_tells_every_event(
    promoted: Path, tmp_path_factory: pytest.TempPathFactory, kills: list[int]
) -> None:
    desk = make_desk(promoted, tmp_path_factory.mktemp("var") / "var", max_messages=2)
    repeats = 0
    for event in kills:
        killed_before(event, desk.tick)
        repeats += count_unrecorded(desk)
    desk.now += 1000
    desk.tick()
    assert len(set(desk.told.ids)) == PROMOTIONS
    keys = [message["key"] for message in desk.told.messages]
    assert len(keys) - len(set(keys)) <= repeats
