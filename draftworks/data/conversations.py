"""Conversations: identified by their content, stored as Parquet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from draftworks.data.split import digest_prompt, hash_fraction
from draftworks.errors import DataError, StoreError
from draftworks.storage.artifacts import FileManifest
from draftworks.storage.files import publish_file, publish_json, read_json
from draftworks.storage.identity import canonical_json, digest, file_digest

ROLES = ("system", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages that hold thoughts: of DeepSeek, Qwen and vLLM; of OpenRouter and later vLLM; of gpt-oss's template."""
CONVERSATIONS_FILE = "conversations.parquet"
QUARANTINE_FILE = "quarantine.jsonl"
SUMMARY_FILE = "summary.json"
SCHEMA_VERSION = 1
ROWS_PER_GROUP = 1000

Scalar = str | int | float | bool


class Identified(Protocol):
    """Anything with a content id: conversations and token rows."""

    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=Identified)

_TURN = pa.struct(
    [("role", pa.string()), ("content", pa.string()), ("reasoning", pa.string()), ("trained", pa.bool_())]
)
_SCHEMA = pa.schema([("id", pa.string()), ("turns", pa.list_(_TURN)), ("columns", pa.string())])


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        role: one of ROLES.
        reasoning: thoughts of an assistant turn that its data keeps apart from its content.
        trained: whether an assistant turn is learnt; otherwise it is only read.
    """

    role: str
    content: str
    reasoning: str = ""
    trained: bool = True

    def to_message(self) -> dict[str, str]:
        """Return the message for a chat template, with the thoughts under each of the names that templates look for."""
        thoughts = dict.fromkeys(REASONING_KEYS, self.reasoning) if self.reasoning else {}
        return {"role": self.role, "content": self.content, **thoughts}


ANSWER = Turn("assistant", "")
"""Stands last where the target is to answer: in rows that end with a question, and in served prompts."""


@dataclass(frozen=True)
class Conversation:
    """Turns in order. `columns` are other scalar fields of the data row, for evaluation slices; never part of `id`."""

    id: str
    turns: tuple[Turn, ...]
    columns: Mapping[str, Scalar] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, turns: Iterable[Turn], columns: Mapping[str, Scalar] | None = None) -> Conversation:
        """Create a conversation whose id is the digest of its turns, so that duplicates collapse."""
        turns = tuple(turns)
        return cls(digest_turns(turns), turns, dict(columns or {}))

    @property
    def awaits_answer(self) -> bool:
        """Whether the last turn is still to be answered, so that `ANSWER` stands there."""
        return self.turns[-1:] == (ANSWER,)

    @property
    def prompt_key(self) -> str:
        """Digest of system and first user turn: what decides whether the conversation is held out."""
        return key_prompt(self.turns)


def digest_turns(turns: Iterable[Turn]) -> str:
    """Return the content digest of turns: role and content of each, in order, and what else a turn says."""
    return digest([_as_digested(turn) for turn in turns])


def _as_digested(turn: Turn) -> list[Any]:
    """Return what tells a turn from others; one that says nothing else stays as it was before there was more to say."""
    more = {"reasoning": turn.reasoning} if turn.reasoning else {}
    more |= {} if turn.trained else {"trained": False}
    return [turn.role, turn.content, *([more] if more else [])]


def key_prompt(turns: Sequence[Turn]) -> str:
    """Return the digest of the system turns before the first user turn, and of that; of all turns if no user turn is there."""
    first = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return digest_prompt(turn.content for turn in turns)
    system = "\n".join(turn.content for turn in turns[:first] if turn.role == "system")
    return digest_prompt([system, turns[first].content])


def select(items: Iterable[Item], max_conversations: int | None) -> list[Item]:
    """Return the first `max_conversations` by hash of their id (None for all), whatever order they came in.

    Stable: an added conversation replaces at most one other.
    """
    ordered = sorted(items, key=lambda each: (hash_fraction(each.id, "select"), each.id))
    return ordered[:max_conversations]


def write_conversations(
    folder: Path, conversations: Iterable[Conversation], counts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Publish conversations.parquet, then summary.json, which makes the set complete; return the summary.

    Args:
        counts: further entries of the summary, as `LoadReport.counts()`.

    Raises:
        DataError: no conversation, or two with one id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    contents: dict[str, str] = {}
    totals = {"turns": 0, "assistant_turns": 0, "characters": 0}
    with publish_file(folder / CONVERSATIONS_FILE) as staging, pq.ParquetWriter(staging, _SCHEMA) as writer:
        for group in _groups(conversations):
            for each in group:
                _count(each, contents, totals)
            writer.write_table(pa.Table.from_pylist([_as_row(each) for each in group], schema=_SCHEMA))
        if not contents:
            raise DataError(f"{folder}: there is no conversation to write")
    summary = {
        "schema": SCHEMA_VERSION,
        "conversations": len(contents),
        **totals,
        **(counts or {}),
        "digest": digest(sorted(contents.items())),
        "file_digest": file_digest(folder / CONVERSATIONS_FILE),
    }
    publish_json(folder / SUMMARY_FILE, summary)
    return summary


def read_conversations(folder: Path) -> Iterator[Conversation]:
    """Stream the conversations of a published folder in the order they were written.

    Raises:
        StoreError: before the first conversation, if the set is missing, incomplete or altered.
    """
    summary = read_summary(folder, "a conversations set")
    FileManifest.of_digests({CONVERSATIONS_FILE: summary["file_digest"]}).require_intact(folder, "Make the set again")
    return _stream(folder / CONVERSATIONS_FILE)


def read_summary(folder: Path, what: str) -> dict[str, Any]:
    """Return the summary that completes a published set.

    Raises:
        StoreError: missing, unreadable, or of another schema.
    """
    path = folder / SUMMARY_FILE
    try:
        summary = read_json(path)
    except FileNotFoundError as error:
        raise StoreError(
            f"{path}: not found, so {folder} is not {what} or was never completed: make it again"
        ) from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: not valid JSON ({error}): make the set again") from error
    found = summary.get("schema") if isinstance(summary, dict) else type(summary).__name__
    if found != SCHEMA_VERSION or "file_digest" not in summary:
        raise StoreError(f"{path}: expected schema {SCHEMA_VERSION} with a file_digest, found schema {found!r}")
    return summary


def _stream(path: Path) -> Iterator[Conversation]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
            for row in batch.to_pylist():
                turns = tuple(Turn(**turn) for turn in row["turns"])
                yield Conversation(row["id"], turns, json.loads(row["columns"]))


def _groups(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    iterator = iter(conversations)
    while group := list(islice(iterator, ROWS_PER_GROUP)):
        yield group


def _as_row(conversation: Conversation) -> dict[str, Any]:
    turns = [asdict(turn) for turn in conversation.turns]
    return {"id": conversation.id, "turns": turns, "columns": canonical_json(dict(conversation.columns))}


def _count(conversation: Conversation, contents: dict[str, str], totals: dict[str, int]) -> None:
    """Add a conversation to the totals, and to the content digests by id: turns may be regenerated under the same id."""
    if conversation.id in contents:
        raise DataError(f"two conversations have the id {conversation.id}: remove duplicates before writing")
    content = [digest_turns(conversation.turns), canonical_json(dict(conversation.columns))]
    contents[conversation.id] = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    totals["turns"] += len(conversation.turns)
    totals["assistant_turns"] += sum(turn.role == "assistant" for turn in conversation.turns)
    totals["characters"] += sum(len(turn.content) for turn in conversation.turns)
