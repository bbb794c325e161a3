"""Rows that come become tasks of every producer: without what is held out or came before, and after a restart each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from answer_toys import conversation
from waiting import wait_until

from draftworks.config.registry_files import DataSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.arriving_rows import ArrivedRows, RowReader
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation
from draftworks.data.split import is_held_out
from draftworks.data.tokenizing import tokenize
from draftworks.errors import DataError
from draftworks.stream.arrival_producer import SOURCE, SourceFact
from draftworks.stream.controller import LOCAL_COLOCATED, resolve_control_plane
from draftworks.stream.row_log import LoggedRows, LoggedSource, RowLog, SourceFeeder
from draftworks.stream.row_sources import TaskLimits

HELD_OUT = 0.3
COMING = [conversation(number) for number in range(24)]


class ListReader(RowReader):
    """Conversations of a list; it is over at its end if that is said."""

    def __init__(self, rows: Sequence[Conversation], start: int, ends: bool) -> None:
        self._rows, self._next, self._ends = rows, start, ends

    def read(self, count: int) -> ArrivedRows:
        found = self._rows[self._next : self._next + count]
        self._next += len(found)
        self.is_over = self._ends and not found
        return ArrivedRows(len(found), found)

    def get_state(self) -> str:
        return str(self._next)


@pytest.fixture
def feeding(tmp_path: Path) -> Iterator[Any]:
    """Feeds rows until `count` of them are written down, or all if they end; returns log, controller and source."""
    plane = resolve_control_plane(LOCAL_COLOCATED, "draft")
    log = RowLog(tmp_path)
    source = LoggedSource(log, None, ResponseSpec(batch_size=4), 32, False, 4 * 32)  # pyright: ignore[reportArgumentType]
    fact = SourceFact("target", 0, 0.0, 4)

    def feed(rows: Sequence[Conversation], ends: bool, done=lambda: True) -> Any:
        feeder = SourceFeeder(
            *(lambda state, is_new: ListReader(rows, int(state or 0), ends), log, source, plane.controller),
            *(TaskLimits(), fact, HELD_OUT, 0.05),
        )
        with feeder.feeding(to_end=ends):
            wait_until(lambda: ('"is_whole": true' in plane.controller.read_facts().get(SOURCE, "")) or not ends)
            wait_until(done)
        feeder.require_sound()
        return log, plane.controller, source

    yield feed
    plane.controller.close()


def list_logged(log: RowLog) -> list[str]:
    return [each.id for number in range(log.count()) for each in log.read(number).conversations]


def test_each_is_logged_once_in_order_unless_its_prompt_is_held_out(feeding):
    log, controller, source = feeding([*COMING, *COMING[:5]], ends=True)
    expected = [each.id for each in COMING if not is_held_out(each.prompt_key, HELD_OUT)]
    assert list_logged(log) == expected
    tasks = list(source.list_tasks("draft"))
    assert controller.count_tasks().pending == len(tasks)
    assert sum(task.size[0] for task in tasks) == len(expected)
    known = controller.read_facts()[SOURCE]
    assert f'"samples": {len(expected)}' in known
    assert '"held_out": ' in known


def test_a_reader_that_is_started_again_goes_on_after_what_is_logged(feeding, tmp_path: Path):
    feeding(COMING[:13], ends=False, done=lambda: len(list(tmp_path.glob("*.json"))) >= 3)
    log, controller, _ = feeding(COMING, ends=True)
    assert list_logged(log) == [each.id for each in COMING if not is_held_out(each.prompt_key, HELD_OUT)]
    assert controller.count_tasks().pending == log.count()


def test_too_many_rows_that_cannot_be_used_end_the_source(tmp_path: Path):
    class Broken(ListReader):
        def read(self, count: int) -> ArrivedRows:
            return ArrivedRows(100, [], ["no format"] * 6)

    plane, log = resolve_control_plane(LOCAL_COLOCATED, "draft"), RowLog(tmp_path)
    source = LoggedSource(log, None, ResponseSpec(), 32, False, 64)  # pyright: ignore[reportArgumentType]
    feeder = SourceFeeder(
        *(lambda state, is_new: Broken((), 0, False), log, source, plane.controller),
        *(TaskLimits(), SourceFact("target", 0, 0.0, 4), HELD_OUT, 0.05),
    )

    with feeder.feeding(to_end=False), pytest.raises(DataError, match="6 of 100 rows rejected"):
        wait_until(feeder.require_sound)


def test_rows_with_their_own_answers_become_the_samples_of_a_prepared_set(tiny_target: TargetFiles, tmp_path: Path):
    log, chat = RowLog(tmp_path), ChatTokenizer.load(tiny_target)
    log.write(0, LoggedRows(COMING[:3]))
    source = LoggedSource(log, chat, ResponseSpec(mode="passthrough"), 64, False, 64)
    (task,) = source.list_tasks("draft")
    expected = tokenize(COMING[:3], tiny_target, DataSpec(), 64).rows
    assert [(row.sample_id, row.token_digest) for row in source.make_rows(task, None)] == [
        (row.sample_id, row.token_digest) for row in expected
    ]
    assert not source.calls_engine
