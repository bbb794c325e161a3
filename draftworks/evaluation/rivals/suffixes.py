"""Suffix decoding (Oliaro et al., arXiv:2411.04975), by the rule and constants of vLLM's `suffix` method. No torch.

The rule is that of Arctic Inference's suffix cache, which vLLM calls; the constants are the defaults of vLLM 0.32. In a text
a *string* of at most MAX_DEPTH tokens has a count: how often it occurs. Of each length m, the last m tokens of the request
are a match if they occur in the text. From a match the likeliest next token is followed as long as the count of the match
and what follows is at least MIN_SHARE of the count of the match, for at most m tokens; their shares are added up to its
score. The match of the highest score proposes, of equal ones the longest. Texts are the request so far, and answers that
were given before, which propose only where their score is higher.

What that leaves open is decided here: of next tokens with equal counts the lowest id is followed. Answers from before do
not contain the request's own, which Arctic's shared cache does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from draftworks.data.tokenized import TokenRow
from draftworks.evaluation.ladder.answer_walk import find_answer_spans

MAX_DEPTH = 24
"""Tokens of a match and its proposal together."""
MIN_SHARE = 0.1
MAX_ANSWERS = 10_000
"""Answers that are kept, the last ones: vLLM's `suffix_decoding_max_cached_requests`."""
MAX_TOKENS = 1 << 22
"""Tokens of these, which take about 50 bytes each while they are sorted and 8 afterwards."""
_KEPT_ANSWERS = 1 << 16
_END = -1
"""No token: it ends every answer."""


class Occurrences(Protocol):
    """The places of one string in a text.

    Attributes:
        times: how many.
    """

    @property
    def times(self) -> int: ...

    def find_likeliest(self) -> Occurrences | None:
        """Return the places where the most frequent next token follows; None where none follows. Its id is `last`."""
        ...

    @property
    def last(self) -> int:
        """The last token of the string."""
        ...


class SuffixProposal(NamedTuple):
    """Proposed tokens, and the sum of their shares."""

    tokens: list[int]
    score: float


def choose_proposal(matches: Sequence[Occurrences], count: int) -> SuffixProposal:
    """Return the proposal of the best match, of at most `count` tokens.

    Args:
        matches: of the last 1, 2, 3, … tokens of a request, as far as they occur in the text.
    """
    best = SuffixProposal([], 0.0)
    for length in range(len(matches), 0, -1):
        if best.score >= min(count, length):  # a share is at most 1: no shorter match has a higher score
            break
        match = matches[length - 1]
        tokens, occurrences, place = [], 0, match
        while len(tokens) < min(count, length):
            place = place.find_likeliest()
            if place is None or place.times / match.times < MIN_SHARE:
                break
            tokens.append(place.last)
            occurrences += place.times
        score = occurrences / match.times  # divided once, so that equal scores are equal
        if score > best.score:
            best = SuffixProposal(tokens, score)
    return best


class _Node:
    """A string that occurs twice or more. A child is a node, or the place of the only occurrence's last token."""

    __slots__ = ("children", "last", "text", "times")

    def __init__(self, text: list[int], last: int, times: int) -> None:
        self.text, self.last, self.times = text, last, times
        self.children: dict[int, _Node | _Leaf] = {}

    def find_likeliest(self) -> _Node | _Leaf | None:
        return max(self.children.values(), key=lambda child: (child.times, -child.last), default=None)


class _Leaf:
    """A string that occurs once: its last token is at `place`. What follows there is not stored again."""

    __slots__ = ("depth", "place", "text")
    times = 1

    def __init__(self, text: list[int], place: int, depth: int) -> None:
        self.text, self.place, self.depth = text, place, depth

    @property
    def last(self) -> int:
        return self.text[self.place]

    def find_likeliest(self) -> _Leaf | None:
        after = self.place + 1
        if self.depth == MAX_DEPTH or after == len(self.text):
            return None
        return _Leaf(self.text, after, self.depth + 1)


class RequestText:
    """The strings of a growing text: a trie that is as deep as strings repeat.

    Attributes:
        matches: the last 1, 2, … tokens, as far as they occurred before too.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._root = _Node(self._text, _END, 0)
        self.matches: list[_Node] = []

    def append(self, token: int) -> None:
        self._text.append(token)
        ended = [self._root, *self.matches[: MAX_DEPTH - 1]]
        grown = (self._add(node, token, depth) for depth, node in enumerate(ended, start=1))
        self.matches = [node for node in grown if node is not None]

    def _add(self, node: _Node, token: int, depth: int) -> _Node | None:
        """Count the token at the end of the text after a string; return the longer string if it occurred before."""
        child = node.children.get(token)
        if child is None:
            node.children[token] = _Leaf(self._text, len(self._text) - 1, depth)
            return None
        if isinstance(child, _Leaf):
            following = child.find_likeliest()
            child = _Node(self._text, token, 1)
            if following is not None:
                child.children[following.last] = following
            node.children[token] = child
        child.times += 1
        return child


class _Range(NamedTuple):
    """The rows of a suffix array that begin with one string of `depth` tokens."""

    text: AnswersText
    low: int
    high: int
    depth: int

    @property
    def times(self) -> int:
        return self.high - self.low

    @property
    def last(self) -> int:
        return self.text.read(self.low, self.depth - 1)

    def find_likeliest(self) -> _Range | None:
        return self.text.find_likeliest(self)


class AnswersText:
    """The strings of answers that were given before: a suffix array of their first MAX_DEPTH tokens."""

    def __init__(self, answers: Sequence[np.ndarray]) -> None:
        parts = [part for answer in answers for part in (answer, [_END])]
        self._tokens = np.concatenate([*parts, np.full(MAX_DEPTH, _END)]).astype(np.int32)  # (N + MAX_DEPTH,)
        self._order = _sort_suffixes(self._tokens)  # (N,)
        self._read, self._row = self._tokens.data, self._order.data
        self.find_likeliest = lru_cache(_KEPT_ANSWERS)(self._find_likeliest)

    @classmethod
    def of(cls, samples: Sequence[TokenRow]) -> AnswersText:
        """Keep the last answers of tokenized samples, at most MAX_ANSWERS and MAX_TOKENS tokens."""
        answers: list[np.ndarray] = []
        room = MAX_TOKENS
        for index in reversed(range(len(samples))):
            sample = samples[index]
            for span in reversed(list(find_answer_spans(sample.loss_mask))):
                room -= span.end - span.begin
                if room < 0 or len(answers) == MAX_ANSWERS:
                    return cls(answers)
                answers.append(sample.input_ids[span.begin : span.end])
        return cls(answers)

    @property
    def root(self) -> _Range:
        return _Range(self, 0, len(self._order), 0)

    def read(self, row: int, offset: int) -> int:
        return self._read[self._row[row] + offset]

    def follow(self, string: _Range, token: int) -> _Range | None:
        """Return the places where a token follows a string; None where it never does."""
        if string.depth == MAX_DEPTH:
            return None
        if string.times == 1:
            same = self.read(string.low, string.depth) == token
            return _Range(self, string.low, string.high, string.depth + 1) if same else None
        rows = range(string.low, string.high)
        low, high = (
            string.low + bisect_left(rows, each, key=lambda row: self.read(row, string.depth))
            for each in (token, token + 1)
        )
        return _Range(self, low, high, string.depth + 1) if low < high else None

    def _find_likeliest(self, string: _Range) -> _Range | None:
        if string.depth == MAX_DEPTH:
            return None
        if string.times == 1:
            single = self.read(string.low, string.depth)
            return None if single == _END else _Range(self, string.low, string.high, string.depth + 1)
        following = self._tokens[self._order[string.low : string.high] + string.depth]  # ascending
        tokens, first, counts = np.unique(following, return_index=True, return_counts=True)
        counts[tokens == _END] = 0
        best = int(counts.argmax())
        if not counts[best]:
            return None
        low = string.low + int(first[best])
        return _Range(self, low, low + int(counts[best]), string.depth + 1)


def _sort_suffixes(tokens: np.ndarray) -> np.ndarray:
    """Return the places of all tokens but the last MAX_DEPTH, sorted by the MAX_DEPTH tokens from there on, int32.

    By prefix doubling (Manber and Myers 1993): the ranks of strings of twice the length are those of pairs of ranks.
    """
    ranks = _rank(tokens)
    for length in (1, 2, 4):
        ranks = _rank_pairs(ranks, ranks, length)
    of_eight = ranks
    for length in (8, 16):
        ranks = _rank_pairs(ranks, of_eight, length)
    return np.argsort(ranks[: len(tokens) - MAX_DEPTH], kind="stable").astype(np.int32)


def _rank_pairs(first: np.ndarray, second: np.ndarray, length: int) -> np.ndarray:
    """Return the ranks of strings of `length` tokens each followed by another, from the ranks of both."""
    following = second[length:]
    count = min(len(first), len(following))
    return _rank(first[:count].astype(np.int64) * (int(second.max()) + 1) + following[:count])


def _rank(values: np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].astype(np.int32)


class SuffixProposer:
    """Suffix decoding over the request so far, and over answers from before if there are any."""

    def __init__(self, before: AnswersText | None = None) -> None:
        self._request = RequestText()
        self._before = before
        self._matches: list[_Range] = []
        self._known = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._known += len(tokens)
        for token in tokens:
            self._request.append(token)
        if self._before is not None:
            for token in tokens[-MAX_DEPTH:]:
                self._match(self._before, token)

    def propose(self, count: int) -> Sequence[int]:
        here = choose_proposal(self._request.matches, count)
        before = choose_proposal(self._matches[: self._known - 1], count)  # a match is shorter than the request
        return before.tokens if before.score > here.score else here.tokens

    def _match(self, text: AnswersText, token: int) -> None:
        grown = (text.follow(match, token) for match in (text.root, *self._matches))
        self._matches = [match for match in grown if match is not None]
