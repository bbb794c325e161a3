"""The assistant's words in a rendered conversation, and what closes its turns."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from draftworks.errors import DataError


class Span(NamedTuple):
    """Characters start..end-1 of a text."""

    start: int
    end: int


class Rendered(NamedTuple):
    """A rendered conversation and the spans that its template marks as generated, in order."""

    text: str
    spans: tuple[Span, ...]


SENTINEL = "\ue0f0draftworks\ue0f1"
"""Placeholder for an assistant turn's content; private-use characters, which no data or template contains."""

_NAME_OF_THOUGHT = r"(?:\w+:)?\w*think\w*(?::\w+)?|thought|reasoning"
_BEGIN_OF_THOUGHT = re.compile(rf"[<\[◁]({_NAME_OF_THOUGHT})[▷\]>]|<\|(?:START_)?(THINK(?:ING)?)\|>", re.IGNORECASE)
_END_OF_THOUGHT = re.compile(rf"[<\[◁]/(?:{_NAME_OF_THOUGHT})[▷\]>]|<\|END_THINK(?:ING)?\|>", re.IGNORECASE)
_EMPTY_THOUGHT = re.compile(rf"({_BEGIN_OF_THOUGHT.pattern})(\s*)(?={_END_OF_THOUGHT.pattern})", re.IGNORECASE)
_MARKUP = re.compile(r"<[^<>\n]*>|\[/?\w+\]|◁[^▷\n]*▷")


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


def measure_common_prefix(first: str, second: str) -> int:
    """Return how many characters two texts begin with, without the beginning of a mark such as `<think>` that parts them."""
    common = len(os.path.commonprefix([first, second]))
    marks = (mark for text in (first, second) for mark in _MARKUP.finditer(text, max(0, common - 100), common + 100))
    return min((mark.start() for mark in marks if mark.start() < common < mark.end()), default=common)


def find_leading_thought(text: str) -> re.Match[str] | None:
    """Return the mark, such as `<think>`, with which a text begins a thought; None if it begins otherwise."""
    return _BEGIN_OF_THOUGHT.match(text, len(text) - len(text.lstrip()))


def take_thought(text: str) -> str:
    """Return the thought of a text that begins with one, without its marks."""
    begin = find_leading_thought(text)
    ends = list(_END_OF_THOUGHT.finditer(text))
    return "" if begin is None or not ends else text[begin.end() : ends[-1].start()].strip()


def find_open_thought(text: str) -> re.Match[str] | None:
    """Return the mark of the thought that a text begins and does not end; None if there is none."""
    return _BEGIN_OF_THOUGHT.search(text, find_end_of_thought(text))


def make_end_of_thought(begin: re.Match[str]) -> str:
    """Return the mark that ends a thought which `begin` begins: `</think>`."""
    name = begin[1] or begin[2]
    return begin[0].replace(name, f"/{name}", 1) if begin[1] else begin[0].replace("START", "END", 1)


def fill_empty_thought(text: str, thought: str) -> str | None:
    """Return the text with a thought between the first marks that have none between them; None without such marks."""
    empty = _EMPTY_THOUGHT.search(text)
    if empty is None:
        return None
    line = "\n" if "\n" in empty[empty.lastindex or 0] else ""
    return f"{text[: empty.start()]}{empty[1]}{line}{thought.strip()}{line}{text[empty.end() :]}"


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
