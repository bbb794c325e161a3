"""Columns by which prompts are told apart: language, length of the prompt, thinking, source.

They are known of a prompt before it is answered, so the same slices that a draft is measured on can be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from draftworks.data.conversations import Conversation, Scalar
from draftworks.data.served.languages import detect_language

LANGUAGE, PROMPT_LENGTH, THINKING, SOURCE = "language", "prompt_length", "thinking", "source"
SLICE_COLUMNS = (LANGUAGE, PROMPT_LENGTH, THINKING, SOURCE)
THINKING_UNKNOWN = "default"
_LENGTHS = ((500, "under 500"), (2_000, "500 to 2k"), (8_000, "2k to 8k"), (32_000, "8k to 32k"))
_LONGEST = "32k or more"


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


def _join_questions(conversation: Conversation) -> str:
    return "\n".join(turn.content for turn in conversation.turns if turn.role == "user")
