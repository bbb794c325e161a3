"""Rows of a source without an end, written down in numbered files as they come, so that every producer finds them there.

One process reads the source: each file it writes is a task, and says what a reader that is started again goes on after.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftworks.capture.engine import TargetEngine
from draftworks.config.registry_files import ResponseSpec
from draftworks.data.arriving_rows import RowReader
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn
from draftworks.data.split import is_held_out
from draftworks.data.tokenized import TokenRow
from draftworks.data.tokenizing import CutSamples, cut_or_reject, encode_own_answers
from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.errors import DataError
from draftworks.storage.files import publish_json, read_json
from draftworks.stream.arrival_producer import LOOK_S, SOURCE, SourceFact
from draftworks.stream.controller import PAGE, DataFlowController
from draftworks.stream.metadata_store import PromptTask
from draftworks.stream.row_sources import ConversationSource, TaskLimits

BACKLOG = 4
"""Tasks that wait for a producer before more of the source is read."""
MANY_SAMPLES = 2**31
NO_LIMITS = TaskLimits()
JUDGED_ROWS = 100
"""From so many rows on, the share of rejected ones is judged."""
ROWS, HELD_OUT, DUPLICATES, REJECTED = "rows", "held_out", "duplicates", "rejected"
Open = Callable[[str | None, bool], RowReader]
"""From the state of an earlier reader, and whether there was none, to the reader of a source."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedRows:
    """What one file has: conversations to train on, counts of the rows read for it, and the source's state after them."""

    conversations: Sequence[Conversation]
    counts: Mapping[str, int] = field(default_factory=dict)
    state: str | None = None


class RowLog:
    """The numbered files, from 0 on; each is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def count(self) -> int:
        """Return the number of files."""
        return sum(1 for _ in self._folder.glob("[0-9]*.json"))

    def write(self, number: int, rows: LoggedRows) -> None:
        conversations = [
            [each.id, [list(astuple(turn)) for turn in each.turns], dict(each.columns)] for each in rows.conversations
        ]
        value = {"conversations": conversations, "counts": dict(rows.counts), "state": rows.state}
        publish_json(self._locate(number), value)

    def read(self, number: int) -> LoggedRows:
        found = read_json(self._locate(number))
        conversations = [
            Conversation(each, tuple(Turn(*turn) for turn in turns), columns)
            for each, turns, columns in found["conversations"]
        ]
        return LoggedRows(conversations, found["counts"], found["state"])

    def _locate(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"


class LoggedSource(ConversationSource):
    """The conversations of a row log, answered by the target, or with their own answers in mode passthrough."""

    def __init__(
        self,
        rows: RowLog,
        chat: ChatTokenizer,
        responses: ResponseSpec,
        max_length: int,
        only_last_turn: bool,
        batch_tokens: int,
    ) -> None:
        super().__init__((), chat, responses, max_length, only_last_turn)
        self.calls_engine = responses.mode == "regenerate"
        self._rows = rows
        self._batch_tokens = batch_tokens

    @property
    def size(self) -> int:
        """As many as no failure of one worker is too many of: the trainer counts the failures of all."""
        return MANY_SAMPLES

    def count_rows(self, limits: TaskLimits) -> int:
        """Return the rows of a task at most."""
        by_tokens = self._batch_tokens // self._max_length
        return max(1, min(by_tokens, self._count_together(limits)))

    def make_task(self, number: int, samples: int, run_id: str, limits: TaskLimits) -> PromptTask:
        """Return the task of a file with so many conversations."""
        size = (samples, samples * self._max_length * limits.bytes_per_token)
        return PromptTask(f"rows-{number}", run_id, step=number, metadata={"number": number}, size=size)

    def list_tasks(self, run_id: str, limits: TaskLimits = NO_LIMITS) -> Iterator[PromptTask]:
        for number in range(self._rows.count()):
            yield self.make_task(number, len(self._rows.read(number).conversations), run_id, limits)

    def make_rows(self, task: PromptTask, engine: TargetEngine | None) -> list[TokenRow]:
        chosen = self._rows.read(task.metadata["number"]).conversations
        if self.calls_engine:
            return self._answer(chosen, engine)
        rows: list[TokenRow] = []
        for each in chosen:
            make = partial(encode_own_answers, self._chat.choose(each), each, self._only_last_turn)
            made = cut_or_reject(each.id, make, self._max_length)
            if isinstance(made, CutSamples):
                rows += made.rows
            else:
                log.warning("conversation %s is left out: %s", each.id, made.reason)
        return rows


class SourceFeeder:
    """Reads a source on a thread of its own, writes what is to be trained into the log, and adds its tasks.

    Left out, before anything is captured, are rows whose prompt is held out and conversations that came before.

    Args:
        fact: what consumers have to know, but for the number of samples.
        max_rejected_share: of the rows; more are an error.
    """

    def __init__(
        self,
        open_reader: Open,
        rows: RowLog,
        source: LoggedSource,
        controller: DataFlowController,
        limits: TaskLimits,
        fact: SourceFact,
        held_out_share: float,
        max_rejected_share: float,
    ) -> None:
        self._open = open_reader
        self._rows = rows
        self._source = source
        self._controller = controller
        self._limits = limits
        self._fact = replace(fact, samples=0, is_whole=False)
        self._held_out_share = held_out_share
        self._max_rejected_share = max_rejected_share
        self._counts: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._next = 0
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def require_sound(self) -> None:
        """Raise what has ended the thread, if that was an error."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def feeding(self, to_end: bool) -> Iterator[None]:
        """Context in which the source is read. With `to_end` it is read ahead of the producers, however long it is."""
        thread = threading.Thread(target=self._run, args=(to_end,), name="source", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(LOOK_S)  # an iterator may wait for its next row for ever

    def _run(self, to_end: bool) -> None:
        block_stop_signals()
        try:
            self._feed(to_end)
        except BaseException as error:
            log.warning("the source of the stream cannot be read: %s", error)
            self._failure = error

    def _feed(self, to_end: bool) -> None:
        known = self._controller.read_facts().get(SOURCE)
        if known is not None and json.loads(known)["is_whole"]:
            return
        reader = self._go_on()
        count = self._source.count_rows(self._limits)
        while not self._stop.is_set():
            waiting = self._controller.count_tasks().pending
            if waiting >= BACKLOG and not to_end:
                self._stop.wait(LOOK_S)
                continue
            arrived = reader.read(count)
            if arrived.rows:
                self._take(arrived.conversations, arrived.rows, arrived.reasons, reader)
            if reader.is_over:
                self._record(is_whole=True)
                return
            if not arrived.rows:
                self._stop.wait(LOOK_S)

    def _go_on(self) -> RowReader:
        """Open the source after what is written down, whose tasks are added unless they were."""
        state, tasks = None, []
        for number in range(self._rows.count()):
            found = self._rows.read(number)
            self._seen.update(each.id for each in found.conversations)
            self._counts.update(found.counts)
            state, self._next = found.state, number + 1
            tasks.append(
                self._source.make_task(number, len(found.conversations), self._controller.run_id, self._limits)
            )
        for first in range(0, len(tasks), PAGE):
            self._controller.add_tasks(tasks[first : first + PAGE])
        self._record(is_whole=False)
        return self._open(state, self._next == 0)

    def _take(self, arrived: Sequence[Conversation], rows: int, reasons: Sequence[str], reader: RowReader) -> None:
        chosen: list[Conversation] = []
        for each in arrived:
            if is_held_out(each.prompt_key, self._held_out_share):
                self._pending[HELD_OUT] += 1
            elif each.id in self._seen:
                self._pending[DUPLICATES] += 1
            else:
                self._seen.add(each.id)
                chosen.append(each)
        self._pending.update({ROWS: rows, REJECTED: len(reasons)})
        self._require_usable(reasons)
        if not chosen:
            return
        self._rows.write(self._next, LoggedRows(chosen, self._pending, reader.get_state()))
        task = self._source.make_task(self._next, len(chosen), self._controller.run_id, self._limits)
        self._controller.add_tasks([task])
        self._next += 1
        self._counts.update(self._pending)
        self._pending.clear()
        self._record(is_whole=False)

    def _require_usable(self, reasons: Sequence[str]) -> None:
        found = self._counts + self._pending
        if reasons and found[ROWS] >= JUDGED_ROWS and found[REJECTED] > self._max_rejected_share * found[ROWS]:
            raise DataError(
                f"the source of a training in arrival order: {found[REJECTED]:,} of {found[ROWS]:,} rows rejected, "
                f"data.max_rejected_share allows {self._max_rejected_share:.1%}. The last: {reasons[-1]}"
            )

    def _record(self, is_whole: bool) -> None:
        counts: dict[str, Any] = dict(self._counts + self._pending)
        fact = replace(self._fact, samples=len(self._seen), is_whole=is_whole, counts=counts)
        self._controller.record_fact(SOURCE, json.dumps(vars(fact)))
