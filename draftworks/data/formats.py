"""Row formats: ShareGPT and OpenAI rows become conversations, pre-tokenized rows token rows."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from draftworks.data.conversations import ANSWER, Conversation, Scalar, Turn
from draftworks.data.token_rows import TokenRow
from draftworks.storage.identity import digest

Format = Literal["sharegpt", "openai", "tokens"]

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(
        ("function_call", "tool_call", "tool", "observation", "function_response", "tool_response"), "tool"
    ),
}
OPENAI_ROLES = {
    "user": "user",
    "assistant": "assistant",
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function"), "tool"),
}
FORMAT_KEYS: dict[str, Format] = {"conversations": "sharegpt", "messages": "openai", "input_ids": "tokens"}
_KEY_OF: dict[Format, str] = {name: key for key, name in FORMAT_KEYS.items()}

TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call")
"""Keys of rows and messages that say which tools there are, or that one is called."""

LONGEST_COLUMN = 256
"""Characters; a longer field is text rather than a slice for evaluation, and is dropped."""
LARGEST_ID = 2**31 - 1


class RowError(ValueError):
    """The reason for which a row is rejected."""


def detect_format(row: Any) -> Format:
    """Return the format of a row by its key.

    Raises:
        RowError: no key of any format, or keys of several.
    """
    if not isinstance(row, dict):
        raise RowError(f"expected an object, found {_kind(row)}")
    found: list[Format] = [name for key, name in FORMAT_KEYS.items() if row.get(key) is not None]
    if len(found) > 1:
        raise RowError(f"keys of several formats in one row: {', '.join(_KEY_OF[name] for name in found)}")
    if not found:
        raise RowError(
            f"expected one of the keys {', '.join(FORMAT_KEYS)}, found {', '.join(map(str, row))[:80] or 'none'}"
        )
    return found[0]


def parse_conversation(row: Any, expected: Format | None = None) -> Conversation:
    """Parse a ShareGPT or OpenAI row; `expected` None accepts both. `ANSWER` follows a last user turn.

    Raises:
        RowError: unknown role, empty or non-text content, neither question nor answer, tools, or another format.
    """
    name = detect_format(row)
    if name == "tokens":
        raise RowError("a pre-tokenized row in a data set of conversations")
    if expected is not None and name != expected:
        raise RowError(f"expected format {expected} (key {_KEY_OF[expected]}), found {name} (key {_KEY_OF[name]})")
    messages = row[_KEY_OF[name]]
    if not isinstance(messages, list):
        raise RowError(f"{_KEY_OF[name]}: expected a list of messages, found {_kind(messages)}")
    read: Callable[[Any], Turn] = _sharegpt_turn if name == "sharegpt" else _openai_turn
    _refuse_tools(row)
    turns = [_located(read, message, number) for number, message in enumerate(messages, start=1)]
    if turns and turns[-1].role == "user":
        turns.append(ANSWER)
    if not any(turn.role == "assistant" for turn in turns):
        raise RowError("no user turn to answer, and no assistant turn")
    return Conversation.of([*_system_of(row, turns), *turns], read_columns(row))


def parse_tokens(row: Any, vocab_size: int | None = None) -> TokenRow:
    """Parse a pre-tokenized row: `input_ids` and `loss_mask` (0 or 1) of equal length, without what `attention_mask` pads.

    Raises:
        RowError: wrong types, lengths, ids outside the vocabulary, nothing supervised, or another format.
    """
    if detect_format(row) != "tokens":
        raise RowError("a conversation in a data set of pre-tokenized rows")
    ids = _integers(row["input_ids"], "input_ids", LARGEST_ID if vocab_size is None else vocab_size - 1)
    mask = _integers(row.get("loss_mask"), "loss_mask", 1)
    if len(ids) != len(mask):
        raise RowError(f"loss_mask has {len(mask)} entries, input_ids {len(ids)}")
    if row.get("attention_mask") is not None:
        real = _find_unpadded(_integers(row["attention_mask"], "attention_mask", 1), len(ids))
        ids, mask = ids[real], mask[real]
    if not any(mask):
        raise RowError("no supervised token: loss_mask is 0 everywhere")
    sample_id = digest([ids, mask])
    return TokenRow(sample_id, np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_), read_columns(row))


def _refuse_tools(found: Mapping[str, Any]) -> None:
    for key in TOOL_KEYS:
        if found.get(key):
            raise RowError(f"{key}: conversations with tools are not supported yet: leave these rows out")


def _system_of(row: Mapping[str, Any], turns: Sequence[Turn]) -> list[Turn]:
    """Return the system turn that a key of the row holds, as LLaMA-Factory writes it."""
    words = row.get("system")
    if words is None or (isinstance(words, str) and not words.strip()):
        return []
    if turns[0].role == "system":
        raise RowError("system: the row has a system turn too")
    return [Turn("system", _text(words, "system"))]


def _find_unpadded(attention: list[int], length: int) -> slice:
    """Return the part of a row that is not padding. Raises RowError for other masks than of one part."""
    if len(attention) != length:
        raise RowError(f"attention_mask has {len(attention)} entries, input_ids {length}")
    if 1 not in attention:
        raise RowError("attention_mask is 0 everywhere")
    start, end = attention.index(1), length - attention[::-1].index(1)
    if 0 in attention[start:end]:
        raise RowError("attention_mask: expected 0 for padding at the ends only, found 0 between tokens")
    return slice(start, end)


def _located(read: Callable[[Any], Turn], message: Any, number: int) -> Turn:
    try:
        return read(message)
    except RowError as error:
        raise RowError(f"turn {number}: {error}") from None


def _sharegpt_turn(message: Any) -> Turn:
    """Parse a turn with `from` and `value`; `role` and `content` under `conversations` occur too."""
    if isinstance(message, dict) and message.get("from") is None and message.get("role") is not None:
        return _openai_turn(message)
    role = _role(message, "from", SHAREGPT_ROLES)
    return Turn(role, _text(message.get("value"), "value"))


def _openai_turn(message: Any) -> Turn:
    role = _role(message, "role", OPENAI_ROLES)
    _refuse_tools(message)
    return Turn(role, _text(_joined_parts(message.get("content")), "content"))


def _role(message: Any, key: str, known: Mapping[str, str]) -> str:
    if not isinstance(message, dict):
        raise RowError(f"expected an object, found {_kind(message)}")
    value = message.get(key)
    if not isinstance(value, str):
        raise RowError(f"{key}: expected a role, found {_kind(value)}")
    if value not in known:
        expected = ", ".join(name for name in known if known[name] != "tool")
        raise RowError(f"unknown role {value[:40]!r}: expected one of {expected}")
    if known[value] == "tool":
        raise RowError(f"role {value}: conversations with tools are not supported yet: leave these rows out")
    return known[value]


def _joined_parts(content: Any) -> Any:
    """Join the text of a list of content parts; anything else is returned unchanged."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowError(f"content: expected parts of type text, found {kind!r}")
        texts.append(part["text"])
    return "".join(texts)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key}: expected text, found {_kind(value)}")
    if not value.strip():
        raise RowError(f"{key}: empty")
    if not _encodable(value):
        raise RowError(f"{key}: not Unicode text (a lone surrogate)")
    return value


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _integers(values: Any, key: str, largest: int) -> list[int]:
    """Return a non-empty list of integers in 0..largest; booleans are accepted as 0 and 1 for a mask only."""
    if not isinstance(values, list):
        raise RowError(f"{key}: expected a list of integers, found {_kind(values)}")
    if not values:
        raise RowError(f"{key}: empty")
    kinds = (int, bool) if largest == 1 else (int,)
    for position, value in enumerate(values):
        if type(value) not in kinds:
            raise RowError(f"{key}[{position}]: expected an integer, found {_kind(value)}")
        if not 0 <= value <= largest:
            raise RowError(f"{key}[{position}]: expected 0 to {largest}, found {reprlib.repr(value)}")
    return [int(value) for value in values]


def read_columns(row: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the other short scalar fields of a data row, for slices of the evaluation."""
    return {
        str(key): value
        for key, value in row.items()
        if key not in FORMAT_KEYS and key != "system" and _encodable(str(key)) and _kept(value)
    }


def _kept(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_COLUMN and _encodable(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {reprlib.repr(value)[:40]}"
