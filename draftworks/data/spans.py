"""The assistant's words in a rendered conversation, and what closes its turns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from draftworks.errors import DataError


class Span(NamedTuple):
    """Characters start..end-1 of a text, or tokens of a sample."""

    start: int
    end: int


class Rendered(NamedTuple):
    """A rendered conversation and the spans that its template marks as generated, in order."""

    text: str
    spans: tuple[Span, ...]


SENTINEL = "\ue0f0draftworks\ue0f1"
"""Placeholder for an assistant turn's content; private-use characters, which no data or template contains."""

_BEGIN_OF_THOUGHT, _END_OF_THOUGHT = (
    re.compile(rf"[<\[◁]{slash}((?:\w+:)?\w*think\w*|thought|reasoning)[▷\]>]", re.IGNORECASE) for slash in ("", "/")
)


def find_last_words(text: str, words: str) -> int | None:
    """Return where the words that end a text begin; None if it ends with others. White space does not matter."""
    position = len(text)
    for letter in reversed("".join(words.split())):
        position -= 1
        while position >= 0 and text[position].isspace():
            position -= 1
        if position < 0 or text[position] != letter:
            return None
    return position


def holds_words(text: str, words: str) -> bool:
    """Whether a text has these words, however white space is moved."""
    return "".join(words.split()) in "".join(text.split())


def find_marked_turns(text: str, marked: Sequence[Span], contents: Sequence[str]) -> list[int]:
    """Return the assistant turns that a template's generation markers mark, by their place among the assistant turns.

    jinja counts characters where the markers are evaluated, so in a macro or a set block it counts others than are printed.

    Args:
        contents: of the assistant turns, without thoughts, in order; a template may mark some of them only.

    Raises:
        DataError: a span does not hold the words of a turn, after those of the span before it.
    """
    found: list[int] = []
    for span in marked:
        said, begin = text[span.start : span.end], found[-1] + 1 if found else 0
        holding = (n for n in range(begin, len(contents)) if holds_words(said, contents[n]))
        number = next(holding, None)
        if number is None:
            raise DataError(
                f"the chat template marks {said[:60]!r} as generated, which are not the words of an assistant turn. Markers do "
                "not work inside a macro or a set block: write them where the words are printed"
            )
        found.append(number)
    return found


def find_begin_of_thought(text: str) -> re.Match[str] | None:
    """Return the first mark that begins a thought, such as `<think>`; its first group is the mark's name."""
    return _BEGIN_OF_THOUGHT.search(text)


def find_end_of_thought(text: str) -> int:
    """Return the position after the last mark that ends a thought, such as `</think>`; 0 if there is none."""
    return max((found.end() for found in _END_OF_THOUGHT.finditer(text)), default=0)


class EndOfTurn:
    """Finds what closes a turn, such as `<|im_end|>`: the model must learn to stop.

    Args:
        special_tokens: the texts of the tokenizer's special tokens.
        swallowing: those of them that the tokenizer joins with the white space after them.
        ending: those of them at which a server stops.
    """

    def __init__(
        self, special_tokens: Iterable[str], swallowing: Collection[str] = (), ending: Collection[str] = ()
    ) -> None:
        tokens = sorted((token for token in special_tokens if token), key=len, reverse=True)
        written = {token: re.escape(token) + r"\s*" * (token in swallowing) for token in tokens}
        anything, end = ("|".join(written[each] for each in chosen) or "(?!)" for chosen in (
            tokens, [token for token in tokens if token in ending],
        ))  # fmt: skip
        self._to_the_end = re.compile(rf"(?:\s*(?:{anything}))*?\s*(?:{end})")
        self._follows = re.compile(rf"\s*(?:{anything})")

    def after(self, text: str, position: int) -> int:
        """Return the end of the special tokens at `position`, after optional white space; `position` if there is none.

        They go as far as the first one at which a server stops; where none does, only the first one closes the turn.
        """
        match = self._to_the_end.match(text, position) or self._follows.match(text, position)
        return match.end() if match else position
