"""Answers of one run by any number of jobs, equal to those of one job.

    {answers}/{identity}.{work}.parts/plan.txt    ids of the conversations to answer, in order; {work} names the input
    {answers}/{identity}.{work}.parts/{n}.jsonl   answers of the n-th window, from the job that has its lease

Job 0 holds the lock of the answers file, writes the plan, and copies the windows' answers into that file in their order. All
jobs answer windows; the plan cuts them, and the batches in them, whoever answers.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from draftworks.capture.answers.answer_sets import find_answers_file, make_answers_identity, read_asked
from draftworks.capture.answers.record_file import RecordFile, read_record_ids
from draftworks.capture.ranges import Range, RangeQueue
from draftworks.config.run_files import RegenerateRun
from draftworks.data.conversations import Conversation, read_conversations
from draftworks.data.rejected import RejectedSample
from draftworks.storage.atomic import publish_file
from draftworks.storage.identity import digest
from draftworks.storage.lease import LeaseLostError

PLAN = "plan.txt"
POLL_S = 0.2
LOOK_S = 10.0
"""Time between two looks into an answers file that grows."""

Windows = Sequence[Sequence[str]]


class WindowAnswerer(Protocol):
    """Answers the conversations of a window that are not in `records`; batches are cut from the whole window.

    Returns the conversations that were refused.
    """

    def __call__(self, window: Sequence[Conversation], records: RecordFile) -> list[RejectedSample]: ...


class SharedAnswers:
    """The part of one job in answering the conversations of a run.

    Args:
        size: conversations of a window.
        beat: called while other jobs are waited for.
    """

    def __init__(
        self, run: RegenerateRun, answer: WindowAnswerer, size: int, beat: Callable[[], None] = lambda: None
    ) -> None:
        self._run = run
        self._answer = answer
        self._size = size
        self._beat = beat
        self._identity = make_answers_identity(run)
        self._file = find_answers_file(run)
        self._ids = list(dict.fromkeys(each.id for each in read_asked(run)))
        self._folder = self._file.with_name(f"{self._file.stem}.{digest([size, self._ids])}.parts")

    def answer_all(self, records: RecordFile) -> list[RejectedSample]:
        """Answer all conversations that `records` lacks, together with other jobs; return those that were refused.

        For job 0, which holds the lock of `records`.
        """
        refused: list[RejectedSample] = []
        excused: set[str] = set()
        while lacking := [each for each in self._ids if each not in records and each not in excused]:
            windows = self._read_plan() or self._write_plan(lacking)
            self._answer_windows(windows)
            for number, result in enumerate(self._make_queue(windows).read_results()):
                with RecordFile(self._locate_part(number), self._identity) as part:
                    records.extend(part[each] for each in part.ids if each not in records)
                refused += [RejectedSample(*each) for each in result["refused"]]
            excused = {each.sample_id for each in refused}
            self._remove_plan()
        return refused

    def help(self) -> None:
        """Answer windows of the plan of job 0, from when there is one until all conversations are answered.

        For jobs other than 0. Returns too where job 0 needs no plan, since everything is answered.
        """
        size, looked_at = -1, 0.0
        while (windows := self._read_plan()) is None:
            now, found = time.monotonic(), self._file.stat().st_size if self._file.exists() else 0
            if found != size and now - looked_at > LOOK_S:
                size, looked_at = found, now
                if read_record_ids(self._file, self._identity).issuperset(self._ids):
                    return
            self._beat()
            time.sleep(POLL_S)
        self._answer_windows(windows)

    def _answer_windows(self, windows: Windows) -> None:
        source = _WindowReader(self._run.conversations)
        for taken in self._make_queue(windows).take(self._beat):
            try:
                self._answer_window(taken, source.read(windows[taken.number]))
            except LeaseLostError:
                continue  # another job has the window, and answers it
            except FileNotFoundError:
                if self._folder.is_dir():
                    raise
                return  # all is answered, by jobs that took this one to be dead

    def _answer_window(self, taken: Range, window: Sequence[Conversation]) -> None:
        with RecordFile(self._locate_part(taken.number), self._identity, taken.lease.confirm) as part:
            refused = self._answer(window, part)
        taken.finish({"refused": [list(each) for each in refused]})

    def _make_queue(self, windows: Windows) -> RangeQueue:
        return RangeQueue(self._folder, len(windows))

    def _locate_part(self, number: int) -> Path:
        return self._folder / f"{number}.jsonl"

    def _write_plan(self, ids: Sequence[str]) -> Windows:
        shutil.rmtree(self._folder, ignore_errors=True)
        with publish_file(self._folder / PLAN) as staging:
            staging.write_text("".join(f"{each}\n" for each in ids))
        return self._cut(ids)

    def _remove_plan(self) -> None:
        """Remove the folder in one step, since other jobs may still make leases in it."""
        aside = self._folder.with_name(f"{self._folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        self._folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _read_plan(self) -> Windows | None:
        try:
            return self._cut((self._folder / PLAN).read_text().split("\n")[:-1])
        except FileNotFoundError:
            return None

    def _cut(self, ids: Sequence[str]) -> Windows:
        return [ids[start : start + self._size] for start in range(0, len(ids), self._size)]


class _WindowReader:
    """Reads windows of a conversations set; where they are asked for in their order, in one pass over the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stream: Iterator[Conversation] = iter(())

    def read(self, ids: Sequence[str]) -> list[Conversation]:
        """Return the conversations of these ids, which are in the set's order."""
        found = self._read_on(ids)
        if len(found) < len(ids):
            self._stream = read_conversations(self._folder)
            found = self._read_on(ids)
        return found

    def _read_on(self, ids: Sequence[str]) -> list[Conversation]:
        wanted, found = set(ids), []
        while wanted and (each := next(self._stream, None)) is not None:
            if each.id in wanted:
                wanted.discard(each.id)
                found.append(each)
        return found
