"""A log of lines that is killed at any change of the file system: appended, cut, replaced by a shorter one, with a header."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
from kill_points import killed_before

from draftworks.errors import StoreError
from draftworks.storage.event_log import EventLog, append_lines, read_lines

MAX_CHANGES = 200


def open_numbers(folder: Path, header: dict[str, str] | None = None) -> EventLog[int]:
    return EventLog(
        folder / "numbers.jsonl", json.loads, lambda n: json.dumps(n).encode(), "some numbers", header=header
    )


def append(log: EventLog[int], number: int, most: int = 100) -> None:
    log.append(lambda _: [number], shorten=lambda every: every[-most:])


def test_lines_are_read_from_where_a_reader_has_come_to(tmp_path: Path):
    path = tmp_path / "lines"
    assert append_lines(path, [b"a", b"", b"ccc"]) == [0, 2, 3]
    with path.open("ab") as stream:
        stream.write(b"torn" * 40_000)  # more than is looked at from the end at once
    assert [line.content for line in read_lines(path)] == [b"a", b"", b"ccc"]
    assert append_lines(path, [b"d"]) == [7]
    assert list(read_lines(path, 7)) == [(7, b"d")]
    assert os.path.getsize(path) == 9


def test_a_log_of_something_else_is_refused_and_left_alone(tmp_path: Path):
    append(open_numbers(tmp_path, {"of": "a"}), 1)
    before = (tmp_path / "numbers.jsonl").read_bytes()
    for use in (open_numbers(tmp_path, {"of": "b"}).read, partial(append, open_numbers(tmp_path, {"of": "b"}), 2)):
        with pytest.raises(StoreError, match=r'line 1: expected the header {"of": "b"}: not one of some numbers'):
            use()
    assert (tmp_path / "numbers.jsonl").read_bytes() == before


@pytest.mark.parametrize("header", [None, {"of": "a"}])
@pytest.mark.parametrize("most", [100, 2], ids=["appended", "replaced"])
def test_killed_at_any_change_the_log_is_as_before_or_as_after(
    tmp_path: Path, header: dict[str, str] | None, most: int
):
    after = [1, 2, 3][-most:]
    for event in range(MAX_CHANGES):
        log = open_numbers(tmp_path / str(event), header)
        append(log, 1)
        append(log, 2)
        log.path.write_bytes(log.path.read_bytes() + b'{"torn')
        killed = killed_before(event, partial(append, log, 3, most))
        found = log.read()
        assert found in ([1, 2], after)
        append(log, 4, most)
        assert log.read() == [*found, 4][-most:]
        assert not list(log.path.parent.glob(".*.tmp"))
        if not killed:
            break
    assert (killed, found) == (False, after)


def test_a_first_line_that_is_killed_leaves_none_or_a_whole_one(tmp_path: Path):
    for event in range(MAX_CHANGES):
        log = open_numbers(tmp_path / str(event), {"of": "a"})
        killed = killed_before(event, partial(append, log, 1))
        found = log.read()
        assert found in ([], [1])
        append(log, 2)
        assert log.read() == [*found, 2]
        if not killed:
            break
    assert not killed
