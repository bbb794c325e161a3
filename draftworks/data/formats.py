"""Row formats: ShareGPT and OpenAI rows become conversations, pre-tokenized rows token rows."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from draftworks.data.conversations import ANSWER, REASONING_KEYS, Conversation, Scalar, Turn
from draftworks.data.tokenized import TokenRow
from draftworks.storage.identity import digest
from draftworks.storage.words import list_fitting, rate

Format = Literal["sharegpt", "openai", "tokens"]

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(
        ("function_call", "tool_call", "tool", "observation", "function_response", "tool_response", "ipython"), "tool"
    ),
}
OPENAI_ROLES = {
    "user": "user",
    "assistant": "assistant",
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "ipython"), "tool"),
}
FORMAT_KEYS: dict[str, Format] = {"conversations": "sharegpt", "messages": "openai", "input_ids": "tokens"}
_KEY_OF: dict[Format, str] = {name: key for key, name in FORMAT_KEYS.items()}

TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call")
"""Keys of rows and messages that say which tools there are, or that one is called."""

SYSTEM_NAMES = ("system_prompt", "system_message", "system_instruction", "instructions", "custom_instruction")
"""Keys under which other data keeps a system prompt. They are not read, and however short, they are no slice alone."""

MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
TRAINED_KEYS = ("weight", "train", "training", "loss")
"""Keys of messages that say whether the turn is learnt: of OpenAI, of axolotl, and of ms-swift."""

MESSAGE_KEYS = {"from", "value", "role", "content", *REASONING_KEYS, *TRAINED_KEYS, *TOOL_KEYS, *MEDIA_KEYS}

LONGEST_COLUMN = 256
"""Characters; a longer field is text rather than a slice for evaluation, and is dropped."""
LARGEST_ID = 2**31 - 1
_SAME = 0.9
"""Similarity from which on a key is taken for a misspelt one: `conversation`, not `message_id`."""


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
        empty = next((key for key in FORMAT_KEYS if key in row), None)
        if empty is not None:
            raise RowError(f"{empty}: expected a list, found nothing")
        close = [f"; did you mean {name}?" for key in row for name in FORMAT_KEYS if rate(str(key), name) > _SAME]
        raise RowError(
            f"expected one of the keys {', '.join(FORMAT_KEYS)}, found {list_fitting(map(str, row), 60)}"
            + "".join(close[:1])
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
    _refuse_unread(row)
    turns = [_located(read, message, number) for number, message in enumerate(messages, start=1)]
    if turns and turns[-1].role == "user":
        turns.append(ANSWER)
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise RowError("no user turn to answer, and no assistant turn")
    if not any(turn.trained for turn in answers):
        raise RowError(f"every assistant turn is excluded from training ({', '.join(TRAINED_KEYS)})")
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


def find_unread_keys(row: Any) -> set[str]:
    """Return the keys of a row and of its messages whose values are not read: neither words nor a column for slices."""
    if not isinstance(row, dict):
        return set()
    known = {
        *FORMAT_KEYS,
        "system",
        *(set(read_columns(row)) - set(SYSTEM_NAMES)),
        *(("loss_mask", "attention_mask") if "input_ids" in row else ()),
    }
    messages = [message for key in ("conversations", "messages") for message in _listed(row.get(key))]
    said = {key for message in messages for key, value in message.items() if key not in MESSAGE_KEYS and _says(value)}
    return {str(key) for key, value in row.items() if key not in known and _says(value)} | {
        f"{key} of a turn" for key in said
    }


def find_system_names(keys: Iterable[str]) -> list[str]:
    """Return those of the keys under which other data keeps a system prompt."""
    return [key for key in keys if key in SYSTEM_NAMES]


def _listed(messages: Any) -> list[dict[str, Any]]:
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def _says(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


def _refuse_unread(found: Mapping[str, Any]) -> None:
    """Raise RowError for what decides what a model reads, and is not read here."""
    for key in TOOL_KEYS:
        if found.get(key):
            raise RowError(f"{key}: conversations with tools are not supported yet: leave these rows out")
    for key in MEDIA_KEYS:
        if found.get(key):
            raise RowError(
                f"{key}: conversations with pictures, sound or films are not supported: leave these rows out"
            )


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
    return _make_turn(_role(message, "from", SHAREGPT_ROLES), message, "value")


def _openai_turn(message: Any) -> Turn:
    return _make_turn(_role(message, "role", OPENAI_ROLES), message, "content")


def _make_turn(role: str, message: Mapping[str, Any], key: str) -> Turn:
    _refuse_unread(message)
    content = message.get(key)
    empty_system = role == "system" and content == ""  # a server sends it on, and templates print it
    words = "" if empty_system else _text(_join_parts(content, "text"), key)
    thoughts = [
        _join_parts(content, "thinking") if isinstance(content, list) else "",
        *map(message.get, REASONING_KEYS),
    ]
    said = list(dict.fromkeys(_text(each, "reasoning") for each in thoughts if each not in (None, "")))
    if said and role != "assistant":
        raise RowError(f"reasoning of a {role} turn: only assistant turns think")
    if len(said) > 1:
        raise RowError(f"{', '.join(REASONING_KEYS)}: several of them, with different thoughts")
    return Turn(role, words, said[0] if said else "", _is_trained(message) or role != "assistant")


def _is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a turn is learnt. Raises RowError for another value than 0, 1, false and true."""
    for key in TRAINED_KEYS:
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise RowError(f"{key}: expected 0 or 1, or false or true, found {_kind(value)}")
        if value is not None and not value:
            return False
    return True


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


def _join_parts(content: Any, kind: Literal["text", "thinking"]) -> Any:
    """Join the parts of one kind of a list of content parts; anything else is returned unchanged."""
    if not isinstance(content, list):
        return content
    texts = {"text": "", "thinking": ""}
    for part in content:
        found = part.get("type") if isinstance(part, dict) else _kind(part)
        if found not in texts or not isinstance(part.get(found), str):
            raise RowError(f"content: expected parts of type text, found {found!r}")
        texts[found] += part[found]
    return texts[kind]


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
