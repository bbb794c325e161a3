"""Columns by which prompts are told apart: language, length of the prompt, thinking, source.

They are known of a prompt before it is answered, so the same slices that a draft is measured on can be trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from draftworks.config.mix import OFF, ON, THINKING
from draftworks.data.conversations import Conversation, Scalar
from draftworks.data.served.languages import detect_language

LANGUAGE, PROMPT_LENGTH, SOURCE = "language", "prompt_length", "source"
LENGTH = "length"
"""Column that every sample of an eval set has: its number of tokens."""
SLICE_COLUMNS = (LANGUAGE, PROMPT_LENGTH, THINKING, SOURCE)
THINKING_UNKNOWN = "default"
THINKING_PAIR = "thinking_pair"
"""Column of conversations that a mix asks with thinking on or off: the id of the prompt, the same for both ways."""
_LENGTHS = ((500, "under 500"), (2_000, "500 to 2k"), (8_000, "2k to 8k"), (32_000, "8k to 32k"))
_LONGEST = "32k or more"
PROMPT_LENGTHS = (*(name for _, name in _LENGTHS), _LONGEST)
"""Values of the column `PROMPT_LENGTH`."""


def name_prompt_length(characters: int) -> str:
    """Return the name of the bin of a prompt's length. Bins are fixed: those of two reports are the same."""
    return next((name for limit, name in _LENGTHS if characters < limit), _LONGEST)


def add_slice_columns(conversation: Conversation, source: str) -> Conversation:
    """Return the conversation with every slice column; a column that it has already stays as it is."""
    known = conversation.columns
    found: dict[str, Scalar] = {
        LANGUAGE: detect_language(_join_questions(conversation)),
        PROMPT_LENGTH: name_prompt_length(count_prompt_characters(conversation)),
        THINKING: THINKING_UNKNOWN,
        SOURCE: source,
    }
    return replace(conversation, columns={**found, **known})


def count_prompt_characters(conversation: Conversation) -> int:
    """Return the number of characters before the last answer."""
    turns = conversation.turns
    prompt = turns[:-1] if turns and turns[-1].role == "assistant" else turns
    return sum(len(turn.content) for turn in prompt)


def select_slice_columns(columns: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the slice columns among the columns of a sample, as text."""
    return {name: str(columns[name]) for name in SLICE_COLUMNS if name in columns}


def ask_with_thinking(conversation: Conversation, thinking: bool) -> Conversation:
    """Return the conversation as one that is asked with thinking on or off, under an id of its own."""
    way = ON if thinking else OFF
    columns = {**conversation.columns, THINKING: way, THINKING_PAIR: conversation.id}
    return replace(conversation, id=f"{conversation.id}.{way}", columns=columns)


def ask_both_ways(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Return every conversation twice: asked with thinking off, and with thinking on."""
    return [ask_with_thinking(one, thinking) for one in conversations for thinking in (False, True)]


def read_asked_thinking(columns: Mapping[str, Scalar]) -> bool | None:
    """Return how a mix asks a conversation with these columns; None where it leaves that to the template."""
    return columns[THINKING] == ON if THINKING_PAIR in columns else None


def _join_questions(conversation: Conversation) -> str:
    return "\n".join(turn.content for turn in conversation.turns if turn.role == "user")
