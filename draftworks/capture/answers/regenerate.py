"""Regenerate the assistant turns of conversations with the target, so that a draft learns the target's own answers.

Every assistant turn is generated in order, many conversations at a time. A finished conversation is written to disk at
once, so a killed run resumes where it was, and a run with some new conversations answers only those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

from draftworks.capture.answers.answer_sets import (
    MissingAnswers,
    SharedAnswers,
    open_kept_answers,
    publish_answers,
    read_asked,
    require_enough,
)
from draftworks.capture.answers.dialogue import Answerer, Dialogue, DialogueAdvance, EngineAnswerer, converse
from draftworks.capture.answers.record_file import RecordFile
from draftworks.capture.answers.remaining import Cost, RemainingTime
from draftworks.capture.background import run_in_background
from draftworks.capture.batch_notes import Progress, ProgressCallback
from draftworks.capture.engine import TargetEngine
from draftworks.config.run_files import RegenerateRun
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation
from draftworks.data.rejected import RejectedSample, check_rejected
from draftworks.errors import CaptureError, DataError

WINDOW = 16
"""Number of batches in a window. Conversations in a window are sorted by prompt length, which reduces padding."""
TELL_S = 5.0
"""Seconds after which progress is told though no answer has ended."""
TELL_EVERY = 256
"""Conversations that are looked at before progress is told again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegenerateSummary:
    """Result of a run. `generated_tokens` and `seconds` are of this run only; `tokens` is the token set's summary."""

    conversations: int
    resumed: int
    missing: MissingAnswers
    generated_tokens: int
    seconds: float
    tokens: dict[str, Any]


def regenerate(
    run: RegenerateRun,
    engine_factory: Callable[[], TargetEngine],
    chat: ChatTokenizer,
    progress: ProgressCallback | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RegenerateSummary:
    """Run `regenerate_with` on a target engine.

    `engine_factory` is called once, and only if something is left to generate.
    """

    def make_answerer() -> Answerer:
        return EngineAnswerer(engine_factory(), run.responses, chat, find_max_sample_length(run))

    return regenerate_with(run, make_answerer, chat, progress, clock)


def regenerate_with(
    run: RegenerateRun,
    make_answerer: Callable[[], Answerer],
    chat: ChatTokenizer,
    progress: ProgressCallback | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RegenerateSummary:
    """Write `out/conversations` (a conversations set) and `out/tokens` (a tokenized set), in the order of the input.

    A conversation ends at the first turn that was cut by a limit. A conversation without a response is dropped, and its
    reason is written to `out/quarantine.jsonl`.

    Args:
        make_answerer: called once, and only if something is left to generate.
        clock: time in seconds, for throughput and the remaining time.

    Raises:
        DataError: more than `run.max_rejected_share` of the conversations, or all of them, got no response. What no
            response can be generated for is counted before the first one.
        EngineError: the answerer cannot go on. Finished conversations are kept.
        StoreError: the conversations or the kept answers are unreadable.
    """
    total = sum(1 for _ in read_asked(run))
    with open_kept_answers(run) as records:
        resumed = sum(1 for each in read_asked(run) if each.id in records)
        worker = _Regeneration(run, make_answerer, chat, resumed, total, progress, clock)
        if resumed < total:
            worker.require_room(records)
        if run.workers > 1:
            refused = SharedAnswers(run, worker.answer_window, worker.window_size, worker.report).answer_all(records)
        else:
            refused = worker.answer_all(records)
        published = publish_answers(run, records, refused)
    return RegenerateSummary(total, worker.resumed, published.missing, worker.tokens, worker.seconds, published.tokens)


@dataclass(frozen=True)
class HelpSummary:
    """What a job did that helped another one: tokens generated, in so many seconds."""

    generated_tokens: int
    seconds: float


def help_to_regenerate(
    run: RegenerateRun,
    make_answerer: Callable[[], Answerer],
    chat: ChatTokenizer,
    progress: ProgressCallback | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> HelpSummary:
    """Answer conversations for the job 0 of the same work, which does as `regenerate_with`; arguments are those."""
    total = sum(1 for _ in read_asked(run))
    worker = _Regeneration(run, make_answerer, chat, 0, total, progress, clock)
    SharedAnswers(run, worker.answer_window, worker.window_size, worker.report).help()
    return HelpSummary(worker.tokens, worker.seconds)


def find_max_sample_length(run: RegenerateRun) -> int:
    """Return the largest number of tokens of a prompt and its answer together."""
    return min(run.max_length, run.target.context)


class _Regeneration:
    """One run: it splits conversations into windows, windows into batches of similar length, and answers turn by turn.

    Attributes:
        resumed: number of conversations that were finished before this run.
        refused: conversations that the answerer refused. They are not stored, so another run tries them again.
        tokens: number of tokens generated in this run.
        seconds: time since the answerer was created.
    """

    def __init__(
        self,
        run: RegenerateRun,
        make_answerer: Callable[[], Answerer],
        chat: ChatTokenizer,
        resumed: int,
        total: int,
        progress: ProgressCallback | None,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._make_answerer = make_answerer
        self._answerer: Answerer | None = None
        self._chat = chat
        self._total = total
        self._progress = progress
        self._clock = clock
        self._max_length = find_max_sample_length(run)
        self.resumed = resumed
        self.refused: list[RejectedSample] = []
        self._done = self.resumed
        self._started = 0.0
        self._left = RemainingTime(run.responses.max_new_tokens)
        self.tokens = 0
        self.seconds = 0.0

    @property
    def window_size(self) -> int:
        return WINDOW * self._run.responses.batch_size

    def require_room(self, records: RecordFile) -> None:
        """Raise DataError if so many conversations leave no room for an answer that the run would end after all others."""
        rejected = []
        for number, each in enumerate(read_asked(self._run)):
            if number % TELL_EVERY == 0:
                self.report()
            reason = records[each.id].get("dropped") if each.id in records else self._look_ahead(each)
            if reason is not None:
                rejected.append(RejectedSample(each.id, reason))
        if rejected:
            require_enough(self._run, rejected, self._total)

    def answer_all(self, records: RecordFile) -> list[RejectedSample]:
        """Answer all conversations that `records` lacks; return those that were refused."""
        unanswered = (each for each in read_asked(self._run) if each.id not in records)
        while window := list(islice(unanswered, self.window_size * self._count_copies())):
            self.answer_window(window, records)
        return self.refused

    def answer_window(self, window: Sequence[Conversation], records: RecordFile) -> list[RejectedSample]:
        """Answer the conversations of a window that `records` lacks; return those that were refused."""
        before = len(self.refused)
        dialogues = self._open_dialogues([each for each in window if each.id not in records], records)
        if dialogues:
            told = self._clock()
            for advance in self._answer(dialogues):
                now = self._clock()
                self._left.spend(advance.read, advance.made, now - max(told, self._started))
                told = now
                if advance.ended:
                    self._keep(advance.ended, records)
                self.report()
        return self.refused[before:]

    def _answer(self, dialogues: Sequence[Dialogue]) -> Iterator[DialogueAdvance]:
        """Yield dialogues as they finish.

        With a concurrent answerer, `size` dialogues per copy of the target run at a time, each one separately;
        otherwise `size` dialogues run together as a batch.
        """
        size, answerer = self._run.responses.batch_size, self._get_answerer()
        if not answerer.concurrent:
            yield from answerer.converse(dialogues, size)
            return
        longest_first = sorted(dialogues, key=lambda each: -len(each.ids))
        for each in _run_concurrently(self._converse_alone, longest_first, size * answerer.replicas):
            ended = () if each is None else (each,)
            yield DialogueAdvance(ended, 0, sum(dialogue.num_generated for dialogue in ended))

    def _count_copies(self) -> int:
        """Return how many copies of the target have to be kept busy; while one finishes a window, the others wait."""
        return self._answerer.replicas if self._answerer is not None and self._answerer.concurrent else 1

    def _get_answerer(self) -> Answerer:
        if self._answerer is None:
            self._answerer = self._make_answerer()
            self._started = self._clock()
            self.report()
        return self._answerer

    def _keep(self, finished: Sequence[Dialogue], records: RecordFile) -> None:
        records.extend(dialogue.to_record() for dialogue in finished if dialogue.refusal is None)
        self._done += len(finished)
        self.tokens += sum(dialogue.num_generated for dialogue in finished)
        for dialogue in finished:
            self._left.end(dialogue.id, dialogue.num_generated, dialogue.num_answers, dialogue.num_cut)
            if dialogue.refusal is not None:
                self._note_refusal(RejectedSample(dialogue.id, dialogue.refusal))
            elif dialogue.stop_reason:
                log.warning("conversation %s ends early: %s", dialogue.id, dialogue.stop_reason)

    def _note_refusal(self, refused: RejectedSample) -> None:
        """Record a refused conversation; raise DataError as soon as too many are, without answering the rest."""
        log.warning("conversation %s: %s", refused.sample_id, refused.reason)
        self.refused.append(refused)
        check_rejected(self.refused, self._total, self._run.max_rejected_share)

    def report(self) -> None:
        """Report the progress; nothing changes in it while this job waits for others."""
        if self._answerer is not None:
            self.seconds = self._clock() - self._started
        if self._progress is not None:
            share = (self._done - self.resumed) / max(1, self._total - self.resumed)
            left_s = self._left.estimate() if self._run.workers == 1 else None  # else others answer too
            if left_s and self.seconds:
                share = self.seconds / (self.seconds + left_s)
            self._progress(Progress("conversations", self._done, self._total, share, self._left.made, self.seconds))

    def _open_dialogues(self, window: Sequence[Conversation], records: RecordFile) -> list[Dialogue]:
        dialogues, dropped = [], []
        for conversation in window:
            try:
                dialogues.append(self._open_dialogue(conversation))
            except DataError as error:
                if conversation.id not in records:
                    dropped.append({"id": conversation.id, "dropped": str(error)})
        records.extend(dropped)
        self._done += len(dropped)
        return dialogues

    def _open_dialogue(self, conversation: Conversation) -> Dialogue:
        return Dialogue(
            conversation, self._chat.choose(conversation), self._max_length, self._run.responses.continue_after_cut
        )

    def _look_ahead(self, conversation: Conversation) -> str | None:
        """Return why no answer can be generated for a conversation; None if one can, whose cost is then noted."""
        try:
            dialogue = self._open_dialogue(conversation)
        except DataError as error:
            return str(error)
        self._left.expect(conversation.id, Cost(len(dialogue.ids), dialogue.num_questions))
        return None

    def _converse_alone(self, dialogue: Dialogue) -> None:
        assert self._answerer is not None
        try:
            converse(self._answerer, [dialogue])
        except CaptureError as error:
            dialogue.refusal = str(error)


def _run_concurrently(
    work: Callable[[Dialogue], None], dialogues: Sequence[Dialogue], threads: int
) -> Iterator[Dialogue | None]:
    """Run `work` on the dialogues in background threads and yield each one when it is done; raise the first error.

    None is yielded when none was done for `TELL_S`.

    Running work is not waited for when the caller stops iterating early or the program ends.
    """
    waiting = iter(dialogues)

    def start_next(count: int) -> dict[Future[None], Dialogue]:
        return {run_in_background(work, dialogue): dialogue for dialogue in islice(waiting, count)}

    running = start_next(threads)
    while running:
        done = wait(running, TELL_S, return_when=FIRST_COMPLETED).done
        if not done:
            yield None
        for future in done:
            dialogue = running.pop(future)
            future.result()
            running |= start_next(1)
            yield dialogue
