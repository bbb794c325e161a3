"""Lines are whole or not there: torn ones, damaged ones, and processes that are killed at any point."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from decision_toys import NOW
from kill_points import killed_before
from pydantic import TypeAdapter

from draftworks.decision.record import Hold, open_log
from draftworks.errors import StoreError
from draftworks.storage.event_log import EventLog

MAX_CHANGES = 200


def log_in(folder: Path) -> EventLog[Hold]:
    return open_log(folder / "sub" / "events.jsonl", TypeAdapter(Hold), "a list of holds")


def hold(name: str) -> Hold:
    return Hold(name, True, "me", "why", NOW)


def append(log: EventLog[Hold], *names: str) -> None:
    log.append(lambda _: [hold(name) for name in names])


def names(log: EventLog[Hold]) -> list[str]:
    return [event.target for event in log.read()]


def test_what_is_appended_is_read(tmp_path: Path):
    log = log_in(tmp_path)
    assert names(log) == []
    append(log, "a", "ö", "c")
    append(log)
    log.append(lambda events: [hold(f"after {len(events)}")])
    assert names(log) == ["a", "ö", "c", "after 3"]


def test_an_error_while_events_are_made_changes_nothing(tmp_path: Path):
    log = log_in(tmp_path)
    append(log, "a")

    def fail(_: tuple[Hold, ...]) -> list[Hold]:
        raise StoreError("no")

    with pytest.raises(StoreError, match="no"):
        log.append(fail)
    assert names(log) == ["a"]


def test_of_a_file_that_was_cut_off_anywhere_the_whole_lines_count(tmp_path: Path):
    log = log_in(tmp_path)
    append(log, "a", "b")
    content = log.path.read_bytes()
    for size in range(0, len(content) + 1, 7):
        log.path.write_bytes(content[:size])
        whole = ["a", "b"][: content[:size].count(b"\n")]
        assert names(log) == whole
        append(log, "c")
        assert names(log) == [*whole, "c"]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"null",
        b"",
        b"\xff\xfe",
        b'{"kind": "hold"}',
        b'{"target": "a", "held": 1, "who": "me", "why": "", "at": 0}',
        b'{"target": "a", "held": true, "who": "me", "why": "", "at": NaN}',
        b'{"target": "a", "held": true, "who": "me", "why": "", "at": -1}',
        b'{"target": "a", "held": true, "who": "me", "why": "", "at": 0, "schema": 2}',
        b'{"target": "' + b"a" * (1 << 17) + b'", "held": true, "who": "me", "why": "", "at": 0}',
        b"[" * 60_000,
    ],
    ids=range(12),
)
def test_a_damaged_line_is_one_clear_error_and_nothing_moves(tmp_path: Path, line: bytes):
    log = log_in(tmp_path)
    append(log, "a")
    content = log.path.read_bytes() + line + b"\n"
    log.path.write_bytes(content)
    for use in (log.read, partial(append, log, "b")):
        with pytest.raises(StoreError, match=r"events\.jsonl, line 2: .*: not one of a list of holds"):
            use()
    assert log.path.read_bytes() == content


def test_what_is_no_file_is_one_clear_error(tmp_path: Path):
    log = log_in(tmp_path)
    log.path.mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be read as a list of holds"):
        log.read()


def test_killed_at_any_change_of_the_file_system_the_events_before_are_whole(tmp_path: Path):
    outcomes = []
    for event in range(MAX_CHANGES):
        log = log_in(tmp_path / str(event))
        append(log, "a")
        log.path.write_bytes(log.path.read_bytes() + b'{"torn')  # what an earlier killed one has left
        killed = killed_before(event, partial(append, log, "b"))
        outcomes.append(names(log))
        append(log, "c")
        assert names(log) == [*outcomes[-1], "c"]
        if not killed:
            break
    assert not killed
    changed = outcomes.index(["a", "b"])
    assert outcomes == [["a"]] * changed + [["a", "b"]] * (len(outcomes) - changed)
    assert changed > 5


def test_a_first_event_that_is_killed_leaves_no_file_or_a_whole_one(tmp_path: Path):
    for event in range(MAX_CHANGES):
        log = log_in(tmp_path / str(event))
        killed = killed_before(event, partial(append, log, "a"))
        assert names(log) in ([], ["a"])
        append(log, "b")
        assert names(log)[-1] == "b"
        if not killed:
            break
    assert not killed
