"""Tokens of rows of text that no tokenizer has read: from kinds of characters, what templates add, and limits of answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftworks.planning.estimates import Estimate

PLAIN, MARKS, OTHERS = Estimate(3.0, 4.0, 5.5), Estimate(1.0, 1.5, 3.0), Estimate(1 / 3, 1.2, 4.0)
"""Characters a token of a vocabulary of 32,000 or more: ASCII letters and single blanks; digits, marks and longer blanks; letters
of other scripts, of which a token has a third at least, as a character has at most three bytes (four are rare)."""
_LARGE_VOCABULARY, _LESS_A_HALVING, _LEAST_SHARE = 32_000, 0.095, 0.4
"""A smaller vocabulary has shorter tokens: of the embedded target's, 2,048 tokens, 2.5 characters of prose."""
TEMPLATE_OF_ROW, TEMPLATE_OF_MESSAGE = Estimate(0.0, 10.0, 80.0), Estimate(2.0, 5.0, 10.0)
"""Tokens that a chat template adds: a system prompt of its own, and the marks around each message."""
UNSEEN_ANSWER_TOKENS = Estimate(50.0, 250.0, 2000.0)
"""Of an answer that is not there: to a logged request, or to a row that ends with a question."""
LEAST_ANSWER_TOKENS = 2.0
"""Of an answer that a target gives: a word, and its end."""
_DEVIATIONS = 3.0
_MOST_DEVIATION = 0.9

_MARKS = re.compile(r"[!-@\[-`{-~]|\s{2,}")
_BLANKS = re.compile(r"\s{2,}")


@dataclass(frozen=True)
class TextSize:
    """Characters of a text by kind; `tokens` are those of rows that have token ids already."""

    plain: float = 0.0
    marks: float = 0.0
    others: float = 0.0
    tokens: float = 0.0

    @classmethod
    def of(cls, text: str) -> TextSize:
        short = _BLANKS.sub("  ", text)
        others = 0 if short.isascii() else sum(not each.isascii() for each in short)
        marks = len(_MARKS.findall(short))
        return cls(len(short) - marks - others, marks, others)

    def __add__(self, other: TextSize) -> TextSize:
        return TextSize(
            self.plain + other.plain, self.marks + other.marks, self.others + other.others, self.tokens + other.tokens
        )

    def count_tokens(self, vocab_size: int | None) -> Estimate:
        halvings = math.log2(_LARGE_VOCABULARY / min(vocab_size or _LARGE_VOCABULARY, _LARGE_VOCABULARY))
        share = max(1.0 - _LESS_A_HALVING * halvings, _LEAST_SHARE)
        low = self.plain / PLAIN.high + self.marks / MARKS.high + self.others / OTHERS.high
        value = (self.plain / PLAIN.value + self.marks / MARKS.value) / share + self.others / OTHERS.value
        high = (self.plain / PLAIN.low + self.marks / MARKS.low) / share + self.others / OTHERS.low
        counted = Estimate.exactly(self.tokens)
        return counted + Estimate(low, value, max(high, value))


@dataclass(frozen=True)
class RowSize:
    """Length of one row, or the mean of several.

    Attributes:
        prompt: everything but answers.
        thoughts: of answers, kept apart from these; a template may leave them out.
        messages: answers included.
        turns: of the assistant.
        unseen: those of them that are not there.
        weight: rows that this one stands for.
    """

    prompt: TextSize
    answer: TextSize
    thoughts: TextSize = TextSize()
    messages: float = 0.0
    turns: float = 1.0
    unseen: float = 0.0
    weight: float = 1.0

    def weigh(self, weight: float) -> RowSize:
        return replace(self, weight=weight)


@dataclass(frozen=True)
class AnswerLimits:
    """How a part of the data is answered.

    Attributes:
        generated: whether the target answers; otherwise the data's own answers are taken.
        new_tokens: of one answer at most.
        max_length: of a sample.
        only_last: only the last answer of a conversation is learnt.
    """

    generated: bool
    new_tokens: int
    max_length: int
    only_last: bool = False


@dataclass(frozen=True)
class ConversationSize:
    """Means of one conversation.

    Attributes:
        samples: into which it is cut, as a template that changes earlier turns begins a sample with each answer.
        generated: tokens that the target generates for it.
    """

    samples: Estimate
    tokens: Estimate
    generated: Estimate


def measure_rows(
    rows: Sequence[RowSize], limits: AnswerLimits, vocab_size: int | None, whole: bool
) -> ConversationSize:
    """Return the mean size of the conversations of these rows.

    Args:
        whole: the rows are all rows of the data. Otherwise bounds have three standard errors of the mean more.
    """
    sizes = [_measure_row(row, limits, vocab_size) for row in rows]
    weights = [row.weight for row in rows]
    means = [
        average([getattr(size, name) for size in sizes], weights, whole) for name in ("samples", "tokens", "generated")
    ]
    return ConversationSize(*means)


def _measure_row(row: RowSize, limits: AnswerLimits, vocab_size: int | None) -> ConversationSize:
    limit, turns = float(limits.max_length), max(row.turns, 1.0)
    prompt, said = row.prompt.count_tokens(vocab_size), row.answer.count_tokens(vocab_size)
    if row.messages:  # else token ids, which no template made
        prompt += TEMPLATE_OF_ROW + TEMPLATE_OF_MESSAGE * row.messages
    thought = row.thoughts.count_tokens(vocab_size)
    answer = (
        Estimate(said.low, said.value + thought.value, said.high + thought.high) + UNSEEN_ANSWER_TOKENS * row.unseen
    )
    if limits.generated:
        most = turns * min(float(limits.new_tokens), limit)
        least = min(turns * LEAST_ANSWER_TOKENS, most)
        answer = Estimate(least, min(max(answer.value, least), most), most)
    samples = Estimate(1.0, 1.0, 1.0 if limits.only_last else turns)
    whole = (prompt + answer).cap(limit)
    repeated = whole.high if limits.only_last else min((prompt + answer).high * (turns + 1) / 2, turns * limit)
    tokens = Estimate(whole.low, whole.value, max(repeated, whole.high))
    return ConversationSize(samples, tokens, answer if limits.generated else Estimate.exactly(0.0))


def average(sizes: Sequence[Estimate], weights: Sequence[float], whole: bool) -> Estimate:
    """Return the weighted mean; of a sample that is not `whole` with three standard errors more either way."""
    total = sum(weights)
    low, value, high = (
        sum(getattr(size, name) * weight for size, weight in zip(sizes, weights, strict=True)) / total
        for name in ("low", "value", "high")
    )
    error = 0.0
    if not whole and value and len(sizes) > 1:
        spread = sum((size.value - value) ** 2 * weight for size, weight in zip(sizes, weights, strict=True)) / total
        error = min(_DEVIATIONS * math.sqrt(spread / (len(sizes) - 1)) / value, _MOST_DEVIATION)
    return Estimate(min(low * (1.0 - error), value), value, max(high * (1.0 + error), value))
