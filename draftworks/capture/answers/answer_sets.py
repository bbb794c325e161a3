"""Finished answers: their file and identity, the sets written from them, and how several hosts share making them."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draftworks.capture.answers.dialogue import build_conversation, build_token_rows, digest_questions
from draftworks.capture.answers.record_file import RecordFile, read_record_ids
from draftworks.capture.engine import make_engine_identity
from draftworks.config.run_files import TOKENS_FOLDER, RegenerateRun
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, read_conversations, write_conversations
from draftworks.data.datasets import make_excerpt
from draftworks.data.rejected import RejectedSample, check_rejected, count_rejections, write_rejected
from draftworks.data.tokenized import write_tokens
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.files import publish_file, publish_json
from draftworks.storage.identity import EngineIdentity, digest
from draftworks.storage.lease import DEFAULT_TIMES, Lease, LeaseLostError, LeasePath, LeaseTimes

CONVERSATIONS = "conversations"
RECORD_SCHEMA = 4
"""Version of the record that `Dialogue.to_record` writes. Another version uses another file."""
MAX_LOGGED_REJECTIONS = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MissingAnswers:
    """Answers that are missing: conversations without any answer, answers cut by a limit, turns never generated."""

    rejected: tuple[RejectedSample, ...]
    unfinished_answers: int
    dropped_turns: int

    def summarize(self) -> dict[str, Any]:
        """Return the fields for the summary of the tokenized set."""
        return {
            **count_rejections(self.rejected),
            "unfinished_answers": self.unfinished_answers,
            "dropped_turns": self.dropped_turns,
        }


@dataclass(frozen=True)
class PublishedAnswers:
    """Result of writing the answer sets: the missing answers, and the summary of the tokenized set."""

    missing: MissingAnswers
    tokens: dict[str, Any]


def find_answers_file(run: RegenerateRun) -> Path:
    """Return the path of the file of finished answers; each identity of answers has its own file."""
    return run.answers / f"{digest(make_answers_identity(run))}.jsonl"


def read_asked(run: RegenerateRun) -> Iterator[Conversation]:
    """Stream the conversations that the target answers, in their order.

    Of those that ask the same the first, where answers are greedy: the others would become the same samples, which an eval
    set would count as several prompts.
    """
    greedy, seen = run.responses.temperature == 0, set[str]()
    for conversation in read_conversations(run.conversations):
        asked = digest_questions(conversation) if greedy else conversation.id
        if asked not in seen:
            seen.add(asked)
            yield conversation


@contextmanager
def open_kept_answers(run: RegenerateRun) -> Iterator[RecordFile]:
    """Open the file of finished answers with this run's identity, locked for this run while the context lasts.

    Answers of the same identity in `run.earlier_answers` are copied into it first. If another run, of this target or of
    one with the same weights, is adding answers of this identity, wait for it: its answers are then reused.

    Raises:
        StoreError: a file of answers is unreadable, or damaged.
    """
    path = find_answers_file(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = f"another run is adding answers to {path}: waiting for it, to reuse its answers"
    with hold_lock(path.with_suffix(".lock"), waiting) as lease:
        answers = RecordFile(path, make_answers_identity(run), lease.confirm)
        for earlier in run.earlier_answers:
            if earlier.name == path.name:
                answers.copy_records_from(earlier)
        yield answers


def make_answers_identity(run: RegenerateRun) -> dict[str, Any]:
    """Return the identity of the answers: the inputs and options that decide them."""
    endpoint = run.responses.endpoint
    engine = EngineIdentity(f"endpoint-{endpoint.server}") if endpoint else make_engine_identity(run.capture)
    return {
        "schema": RECORD_SCHEMA,
        "target": run.target.digest,
        "tokenizer": run.target.tokenizer_digest,
        "engine": engine.name,
        "numerics": engine.numerics,
        "responses": run.responses.to_identity(),
        "max_length": run.max_length,
    }


def publish_answers(
    run: RegenerateRun, answers: RecordFile, refused: Sequence[RejectedSample] = ()
) -> PublishedAnswers:
    """Write `out/conversations` and `out/tokens` in the order of the input, and first `out/quarantine.jsonl`.

    Args:
        refused: conversations that the answerer refused in this run. They are not in `answers`, because a later run may
            get an answer for them.

    Raises:
        DataError: more than `run.max_rejected_share` of the conversations, or all of them, have no answer.
    """
    ids = [each.id for each in read_asked(run)]
    missing = _collect_missing((answers[each] for each in ids if each in answers), refused)
    require_enough(run, missing.rejected, len(ids))
    for each in missing.rejected[:MAX_LOGGED_REJECTIONS]:
        log.warning("conversation %s has no answer: %s", each.sample_id, each.reason)
    if len(missing.rejected) > MAX_LOGGED_REJECTIONS:
        log.warning("and %d more have no answer", len(missing.rejected) - MAX_LOGGED_REJECTIONS)
    conversations = (build_conversation(answers[each.id], each) for each in _iterate_answered(run, missing))
    write_conversations(run.out / CONVERSATIONS, conversations, {"dropped": len(missing.rejected)})
    rows = (
        row
        for each in _iterate_answered(run, missing)
        for row in build_token_rows(answers[each.id], each, run.only_last_turn)
    )
    repeated = sum(1 for _ in read_conversations(run.conversations)) - len(ids)
    return PublishedAnswers(
        missing, write_tokens(run.out / TOKENS_FOLDER, rows, {**missing.summarize(), "repeated": repeated})
    )


def require_enough(run: RegenerateRun, rejected: Sequence[RejectedSample], total: int) -> None:
    """Write `out/quarantine.jsonl`; raise DataError if more than `run.max_rejected_share` of `total` is rejected, or all."""
    quarantine = run.out / QUARANTINE_FILE
    write_rejected(quarantine, _add_excerpts(run, rejected))
    check_rejected(rejected, total, run.max_rejected_share, quarantine)


def _collect_missing(records: Iterable[dict[str, Any]], refused: Sequence[RejectedSample]) -> MissingAnswers:
    rejected, unfinished, dropped_turns = list(refused), 0, 0
    for record in records:
        if "dropped" in record:
            rejected.append(RejectedSample(record["id"], record["dropped"]))
        else:
            unfinished += record["unfinished"]
            dropped_turns += record["dropped_turns"]
    return MissingAnswers(tuple(rejected), unfinished, dropped_turns)


def _add_excerpts(run: RegenerateRun, rejected: Sequence[RejectedSample]) -> list[RejectedSample]:
    """Add the beginning of each rejected conversation, so that a reader can recognise it."""
    wanted = {each.sample_id for each in rejected}
    excerpts = {
        each.id: make_excerpt(each.turns[0].content)
        for each in read_conversations(run.conversations)
        if each.id in wanted
    }
    return [each._replace(excerpt=excerpts.get(each.sample_id, "")) for each in rejected]


def _iterate_answered(run: RegenerateRun, missing: MissingAnswers) -> Iterator[Conversation]:
    rejected_ids = {each.sample_id for each in missing.rejected}
    return (each for each in read_asked(run) if each.id not in rejected_ids)


POLL_S = 0.2


@dataclass(frozen=True)
class Range:
    """A range that this process works on, until the iterator that yielded it goes on."""

    number: int
    lease: Lease
    done_path: Path

    def finish(self, result: Any) -> None:
        """Publish the range's result. Raises LeaseLostError if another process was given the range meanwhile."""
        self.lease.confirm()
        publish_json(self.done_path, result)


class RangeQueue:
    """The ranges 0 to `count - 1` of the plan in `folder`."""

    def __init__(self, folder: Path, count: int, times: LeaseTimes = DEFAULT_TIMES) -> None:
        self._folder = folder
        self._count = count
        self._times = times

    def take(self, while_waiting: Callable[[], None] = lambda: None) -> Iterator[Range]:
        """Yield each range that is not done and that nobody works on, until all are done or the folder is removed.

        A range that its consumer does not finish is taken again later, by this process or another. After a LeaseLostError
        in a range, the consumer may go on with the next.

        Args:
            while_waiting: called every while when others work on all ranges that are left.
        """
        left = {number: LeasePath(self._folder / f"{number}.lock", self._times) for number in range(self._count)}
        while left and self._folder.is_dir():
            taken = 0
            for number, path in list(left.items()):
                if self._is_done(number):
                    del left[number]
                    continue
                lease = _try_acquire(path)
                if lease is None:
                    continue
                try:
                    if not self._is_done(number):
                        taken += 1
                        yield Range(number, lease, self._locate(number))
                finally:
                    lease.release()
            if left and not taken:
                while_waiting()
                time.sleep(POLL_S)

    def read_results(self) -> list[Any]:
        """Return the results of all ranges, in order. Raises FileNotFoundError if one is not done."""
        return [json.loads(self._locate(number).read_text()) for number in range(self._count)]

    def _is_done(self, number: int) -> bool:
        return self._locate(number).exists()

    def _locate(self, number: int) -> Path:
        return self._folder / f"{number}.done"


def _try_acquire(path: LeasePath) -> Lease | None:
    try:
        return path.try_acquire()
    except FileNotFoundError:
        return None  # all is done, and the folder has been removed


PLAN = "plan.txt"
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
                part = RecordFile(self._locate_part(number), self._identity)
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
        part = RecordFile(self._locate_part(taken.number), self._identity, taken.lease.confirm)
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
