"""Let the target answer the conversations itself, so that a draft learns what the target says.

Every assistant turn is generated in order, in batches; a finished conversation is on disk at once, so a run that is
killed goes on where it was, and a run with some new conversations answers only those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from draftworks.capture.dialogue import Dialogue, recorded_conversation, recorded_row
from draftworks.capture.engine import TargetEngine, engine_identity
from draftworks.capture.partial import PartialFile
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, read_conversations, write_conversations
from draftworks.data.tokenized import write_tokens
from draftworks.errors import DataError
from draftworks.identity import digest
from draftworks.runs import RegenerateRun
from draftworks.specs import CaptureSpec

CONVERSATIONS = "conversations"
TOKENS = "tokens"
WINDOW = 16
"""Batches among which conversations are sorted by the length of their prompt, so that little is padding."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegenerateProgress:
    """Where a run stands. `resumed` conversations were done before it began; `tokens` were generated in this run."""

    done: int
    conversations: int
    resumed: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        now = self.done - self.resumed
        return (self.conversations - self.done) * self.seconds / now if now else None


@dataclass(frozen=True)
class RegenerateSummary:
    """What came of a run. `dropped` are conversations without a response, with the reason.

    `generated_tokens` and `seconds` are of this run alone.
    """

    conversations: int
    resumed: int
    dropped: dict[str, str]
    generated_tokens: int
    seconds: float
    tokens: dict[str, Any]


def regenerate(
    run: RegenerateRun,
    engine: Callable[[], TargetEngine],
    chat: ChatTokenizer,
    progress: Callable[[RegenerateProgress], None] | None = None,
) -> RegenerateSummary:
    """Write `out/conversations` (a conversations set) and `out/tokens` (a tokenized set), in the order of the input.

    A conversation ends at the first turn that was cut by a limit. One that gets no response is dropped, with its reason.

    Args:
        engine: called once, and only if something is left to generate.

    Raises:
        DataError: no conversation got a response.
        StoreError: the conversations or the kept answers are unreadable.
    """
    total = sum(1 for _ in read_conversations(run.conversations))
    with PartialFile(answers_file(run), _identity(run)) as partial:
        worker = _Regeneration(run, engine, chat, partial, total, progress)
        worker.run()
        published = _publish(run, partial, total)
    return RegenerateSummary(total, worker.resumed, published.dropped, worker.tokens, worker.seconds, published.tokens)


def answers_file(run: RegenerateRun) -> Path:
    """Where finished answers are kept: one file for each identity of answers."""
    return run.answers / f"{digest(_identity(run))}.jsonl"


def capture_spec(run: RegenerateRun) -> CaptureSpec:
    """How to load the engine of a run."""
    return CaptureSpec(device=run.device, compute_dtype=run.compute_dtype)


class _Published(NamedTuple):
    dropped: dict[str, str]
    tokens: dict[str, Any]


class _Regeneration:
    """One run: conversations in windows, windows in batches of similar length, batches turn by turn."""

    def __init__(
        self,
        run: RegenerateRun,
        engine: Callable[[], TargetEngine],
        chat: ChatTokenizer,
        partial: PartialFile,
        total: int,
        progress: Callable[[RegenerateProgress], None] | None,
    ) -> None:
        self._run = run
        self._factory = engine
        self._engine: TargetEngine | None = None
        self._chat = chat
        self._partial = partial
        self._total = total
        self._progress = progress
        self._max_length = min(run.max_length, run.target.context)
        self.resumed = sum(1 for each in read_conversations(run.conversations) if each.id in partial)
        self._done = self.resumed
        self.tokens = 0
        self.seconds = 0.0

    def run(self) -> None:
        started = time.monotonic()
        size = self._run.responses.batch_size
        left = (each for each in read_conversations(self._run.conversations) if each.id not in self._partial)
        for window in _chunks(left, WINDOW * size):
            for batch in _chunks(sorted(self._opened(window), key=lambda each: len(each.ids)), size):
                self._answer(batch)
                self._partial.extend(dialogue.record() for dialogue in batch)
                self._done += len(batch)
                for dialogue in batch:
                    if dialogue.stopped:
                        log.warning("conversation %s ends early: %s", dialogue.id, dialogue.stopped)
                self.tokens += sum(dialogue.generated for dialogue in batch)
                self.seconds = time.monotonic() - started
                if self._progress is not None:
                    self._progress(RegenerateProgress(self._done, self._total, self.resumed, self.tokens, self.seconds))
        self.seconds = time.monotonic() - started

    def _opened(self, window: Sequence[Conversation]) -> list[Dialogue]:
        dialogues, dropped = [], []
        for conversation in window:
            try:
                dialogues.append(Dialogue(conversation, self._chat, self._max_length))
            except DataError as error:
                dropped.append({"id": conversation.id, "dropped": str(error)})
        self._partial.extend(dropped)
        self._done += len(dropped)
        return dialogues

    def _answer(self, batch: Sequence[Dialogue]) -> None:
        self._engine = self._engine or self._factory()
        turn, active = 0, list(batch)
        while active:
            responses = self._engine.generate(
                [dialogue.ids for dialogue in active],
                self._run.responses,
                [dialogue.id for dialogue in active],
                self._max_length,
                turn=turn,
                end_ids=self._chat.eos_ids,
            )
            for dialogue, response in zip(active, responses, strict=True):
                dialogue.add(response)
            active = [dialogue for dialogue in active if not dialogue.done]
            turn += 1


def _publish(run: RegenerateRun, partial: PartialFile, total: int) -> _Published:
    dropped: dict[str, str] = {}
    for each in read_conversations(run.conversations):
        if reason := partial[each.id].get("dropped"):
            dropped[each.id] = reason
    if len(dropped) == total:
        first = next(iter(dropped.values()), "there are none")
        raise DataError(f"{run.conversations}: no conversation got a response; the first: {first}")
    for reason in list(dropped.values())[:5]:
        log.warning("dropped: %s", reason)
    answered = ((each, partial[each.id]) for each in read_conversations(run.conversations) if each.id not in dropped)
    conversations = (recorded_conversation(record, each) for each, record in answered)
    write_conversations(run.out / CONVERSATIONS, conversations, {"dropped": len(dropped)})
    answered = ((each, partial[each.id]) for each in read_conversations(run.conversations) if each.id not in dropped)
    rows = (recorded_row(record, each, run.only_last_turn) for each, record in answered)
    return _Published(dropped, write_tokens(run.out / TOKENS, rows))


def _identity(run: RegenerateRun) -> dict[str, Any]:
    """What decides the answers: one file of them for each identity."""
    return {
        "target": run.target.digest,
        "tokenizer": run.target.tokenizer_digest,
        "engine": engine_identity(capture_spec(run)).name,
        "responses": run.responses.identity(),
        "max_length": run.max_length,
    }


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
