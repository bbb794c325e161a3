"""The file and identity of finished answers, and the conversation and token sets written from them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.capture.answers.dialogue import build_conversation, build_token_rows, digest_questions
from draftworks.capture.answers.record_file import RecordFile
from draftworks.capture.engine import make_engine_identity
from draftworks.config.run_files import TOKENS_FOLDER, RegenerateRun
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, read_conversations, write_conversations
from draftworks.data.raw_rows import make_excerpt
from draftworks.data.rejected import RejectedSample, check_rejected, count_rejections, write_rejected
from draftworks.data.tokenized import write_tokens
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.identity import EngineIdentity, digest

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
    with (
        hold_lock(path.with_suffix(".lock"), waiting) as lease,
        RecordFile(path, make_answers_identity(run), lease.confirm) as answers,
    ):
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
