"""Character spans of the assistant in a rendered conversation, and the tokens inside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from draftworks.errors import DataError


class Span(NamedTuple):
    """Characters start..end-1 of a text."""

    start: int
    end: int


class Rendered(NamedTuple):
    """A rendered conversation and its assistant spans, in order."""

    text: str
    spans: tuple[Span, ...]


TRANSFORMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.lstrip, str.rstrip)
"""What templates do to the content of a turn before they print it."""


def make_sentinel(turn: int) -> str:
    """Return a placeholder for an assistant turn's content; private-use characters, which no data or template contains."""
    return f"\ue0f0draftworks{turn}\ue0f1"


def locate(text: str, template_text: str, turns: Sequence[int], contents: Sequence[str]) -> tuple[Span, ...]:
    """Return the spans of the assistant turns' contents in a rendered text.

    Args:
        text: the rendered conversation.
        template_text: the same, rendered with `make_sentinel(turn)` as content of each assistant turn.
        turns: numbers of the assistant turns.
        contents: content of each of them.

    Raises:
        DataError: the text is not what the template prints around the contents, printed as they are or stripped.
    """
    literals = _around_sentinels(template_text, turns)
    for transform in TRANSFORMS:
        parts = [transform(content) for content in contents]
        pieces = [literals[0], *(piece for pair in zip(parts, literals[1:]) for piece in pair)]
        if "".join(pieces) == text:
            ends = np.cumsum([len(piece) for piece in pieces]).tolist()
            return tuple(Span(ends[i - 1], ends[i]) for i in range(1, len(pieces), 2))
    raise DataError(
        "the chat template changes the assistant's words (beyond stripping spaces), so they cannot be located:"
        " use a template with {% generation %} markers"
    )


def narrow_to_words(text: str, marked: Sequence[Span], contents: Sequence[str]) -> tuple[Span, ...]:
    """Return the spans that a template's generation markers give, each from the first word of its assistant turn on.

    jinja counts characters where the markers are evaluated, so in a macro or a set block it counts others than are printed.

    Args:
        contents: of the assistant turns, in order; a template may mark some of them only.

    Raises:
        DataError: a span does not hold the words of a turn, after those of the span before it.
    """
    found, left = [], iter(contents)
    for span in marked:
        said = text[span.start : span.end]
        start = next((at for content in left if (at := _find_words(said, content)) is not None), None)
        if start is None:
            raise DataError(
                f"the chat template marks {said[:60]!r} as generated, which are not the words of an assistant turn. Markers do "
                "not work inside a macro or a set block: write them where the words are printed"
            )
        found.append(Span(span.start + start, span.end))
    return tuple(found)


def _find_words(said: str, content: str) -> int | None:
    """Return where a turn's words begin; None if they are not there. Moved white space and special tokens do not matter."""
    for transform in TRANSFORMS:
        if (at := said.find(transform(content))) >= 0:
            return at
    first = content.split()[:1]
    spread = first and "".join(content.split()) in "".join(said.split())
    return said.find(first[0]) if spread else None


def _around_sentinels(template_text: str, turns: Sequence[int]) -> list[str]:
    literals, rest = [], template_text
    for turn in turns:
        before, found, rest = rest.partition(make_sentinel(turn))
        if not found or make_sentinel(turn) in rest:
            raise DataError(
                f"the chat template does not print assistant turn {turn + 1} exactly once and in order:"
                " use a template with {% generation %} markers"
            )
        literals.append(before)
    return [*literals, rest]


class EndOfTurn:
    """Finds the special token that closes a turn, such as `<|im_end|>`: the model must learn to stop.

    Args:
        special_tokens: the texts of the tokenizer's special tokens.
        swallowing: those of them that the tokenizer joins with the white space after them.
    """

    def __init__(self, special_tokens: Iterable[str], swallowing: Collection[str] = ()) -> None:
        tokens = sorted((token for token in special_tokens if token), key=len, reverse=True)
        alternatives = "|".join(re.escape(token) + r"\s*" * (token in swallowing) for token in tokens) or "(?!)"
        self._follows = re.compile(rf"\s*(?:{alternatives})")
        self._closes = re.compile(rf"(?:{alternatives})\s*\Z")
        self._swallows = re.compile(rf"(?:{'|'.join(map(re.escape, swallowing)) or '(?!)'})\s*\Z")

    def after(self, text: str, position: int) -> int:
        """Return the end of the special token at `position`, after optional white space; `position` if there is none."""
        match = self._follows.match(text, position)
        return match.end() if match else position

    def append(self, text: str, span: Span) -> Span:
        """Return the span extended by the token that closes it."""
        return Span(span.start, self.after(text, span.end))

    def complete(self, text: str, span: Span) -> Span:
        """Return the span with its closing token, which markers in templates may or may not include."""
        said = text[span.start : span.end]
        if self._swallows.search(said):
            return Span(span.start, len(text) - len(text[span.end :].lstrip()))
        return span if self._closes.search(said) else self.append(text, span)


def build_label_mask(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return the loss mask (S,) bool: tokens that lie entirely inside one span.

    Args:
        offsets: int (S, 2), first character of each token and the one after its last. Some tokenizers leave the white
            space before a word out of its offsets although the token contains it, so each token is taken to begin where
            the previous one ended: a token that crosses the border of a span is not supervised.
    """
    mask = np.zeros(len(offsets), dtype=np.bool_)
    if not len(offsets) or not spans:
        return mask
    ends = np.maximum.accumulate(offsets[:, 1])
    starts = np.minimum(offsets[:, 0], np.concatenate(([0], ends[:-1])))
    for span in spans:
        mask |= (starts >= span.start) & (ends <= span.end)
    return mask & (ends > starts)
