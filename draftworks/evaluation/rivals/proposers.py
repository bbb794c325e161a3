"""What proposes tokens without a model: nothing, a table of bigrams, prompt lookup. No torch.

A proposer reads the tokens of one request, prompt and answer so far, and copies or looks up what may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftworks.data.tokenized import TokenizedSet
from draftworks.data.vocab import count_supervised_tokens


class Proposer(Protocol):
    """Proposes for one request."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the request; the first call has its prompt."""
        ...

    def propose(self, count: int) -> Sequence[int]:
        """Return at most `count` tokens that may follow, perhaps none."""
        ...


class NoProposer:
    """Decoding without a draft."""

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, count: int) -> Sequence[int]:
        return ()


@dataclass(frozen=True, eq=False)
class BigramTable:
    """The most frequent supervised next token of every token id, int64 (V,); ties go to the lowest id.

    A token that is never followed by a supervised token maps to the most frequent supervised token of the set.
    """

    successor: np.ndarray

    @classmethod
    def count(cls, tokens: TokenizedSet, vocab_size: int) -> BigramTable:
        """Count the token pairs of every sample whose second token is supervised.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        unigram = int(count_supervised_tokens(tokens, vocab_size).argmax())
        ids, is_second = tokens.flat_ids.astype(np.int64), tokens.flat_mask.copy()
        is_second[np.cumsum(tokens.lengths) - tokens.lengths] = False
        second = np.flatnonzero(is_second)
        pairs, counts = np.unique(ids[second - 1] * vocab_size + ids[second], return_counts=True)
        first, following = np.divmod(pairs, vocab_size)
        best_first = np.lexsort((following, -counts, first))
        seen, where = np.unique(first[best_first], return_index=True)
        successor = np.full(vocab_size, unigram, dtype=np.int64)
        successor[seen] = following[best_first][where]
        return cls(successor)


class BigramProposer:
    """A chain: what most often follows the last token, what most often follows that, and so on."""

    def __init__(self, table: BigramTable) -> None:
        self._successor = table.successor
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._last = tokens[-1]

    def propose(self, count: int) -> Sequence[int]:
        chain, token = [], self._last
        for _ in range(count):
            token = int(self._successor[token])
            chain.append(token)
        return chain


class LookupProposer:
    """Prompt lookup: finds the last n tokens in the request before, and copies what followed there, up to its end.

    Args:
        sizes: the n that are tried, in this order.
        newest: copy from the most recent place, else from the earliest one.
    """

    def __init__(self, sizes: Sequence[int], newest: bool) -> None:
        self._sizes = tuple(sizes)
        self._newest = newest
        self._known: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # from n tokens to the place of the one that followed them

    def extend(self, tokens: Sequence[int]) -> None:
        known, followed = self._known, self._followed
        for token in tokens:
            for size in self._sizes:
                if len(known) >= size:
                    key = tuple(known[-size:])
                    if self._newest or key not in followed:
                        followed[key] = len(known)
            known.append(token)

    def propose(self, count: int) -> Sequence[int]:
        for size in self._sizes:
            place = self._followed.get(tuple(self._known[-size:]))
            if place is not None:
                return self._known[place : place + count]
        return ()
