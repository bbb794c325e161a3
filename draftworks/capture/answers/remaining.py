"""Time that answers still take, from what is left to read and to generate and from what either cost so far.

The length of an answer is not known before it ends, and short ones end first. Answers that run count too, therefore: with
`made` tokens and `ends` answers that ended by themselves, the mean length of answers without a limit is made / ends (the
estimate of an exponential distribution from observations that are cut off), and that of answers with a limit L is
m (1 - exp(-L / m)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one conversation asks for: tokens of its first prompt, and number of answers."""

    prompt: int
    answers: int


@dataclass(frozen=True)
class _Amount:
    """What conversations ask for: answers, tokens of all prompts without answers, and answers that prompts have in them.

    Each prompt of a conversation has those before it, and their answers; later questions are taken for as long as the first.
    """

    answers: int = 0
    prompts: int = 0
    answers_read: int = 0

    def add(self, cost: Cost, times: int) -> _Amount:
        earlier = cost.answers * (cost.answers - 1) // 2
        return _Amount(
            self.answers + times * cost.answers,
            self.prompts + times * cost.prompt * (cost.answers + earlier),
            self.answers_read + times * earlier,
        )


class RemainingTime:
    """Estimate of the seconds left.

    Args:
        limit: largest number of tokens of an answer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[str, Cost] = {}
        self._left = _Amount()
        self._read = self._made = 0
        self._read_s = self._made_s = 0.0
        self._ends = 0
        self._ended_read = self._ended_made = 0.0

    @property
    def made(self) -> int:
        """Tokens of answers so far, those of unfinished ones included."""
        return self._made

    def expect(self, conversation: str, cost: Cost) -> None:
        """Add a conversation that is to be answered."""
        if conversation not in self._waiting:
            self._waiting[conversation] = cost
            self._left = self._left.add(cost, 1)

    def spend(self, read: int, made: int, seconds: float) -> None:
        """Note what was done. `read` is 0 where nobody knows how much of the time was reading."""
        self._read, self._made = self._read + read, self._made + made
        if read:
            self._read_s += seconds
        else:
            self._made_s += seconds

    def end(self, conversation: str, made: int, answers: int, cut: int) -> None:
        """Note the end of a conversation with so many tokens in so many answers, of which some were cut by the limit."""
        cost = self._waiting.pop(conversation, None)
        if cost is not None:
            self._left = self._left.add(cost, -1)
            self._ended_read += self._count_read(_Amount().add(cost, 1))
            self._ended_made += made
        self._ends += answers - cut

    def estimate(self) -> float | None:
        """Return the seconds left; None while nothing is known."""
        if not self._made or not self._made_s:
            return None
        to_make, to_read = self.expected_length * self._left.answers, self._count_read(self._left)
        make_left = max(0.0, to_make - (self._made - self._ended_made))
        read_left = max(0.0, to_read - (self._read - self._ended_read))
        return make_left * self._made_s / self._made + (read_left * self._read_s / self._read if self._read else 0.0)

    @property
    def expected_length(self) -> float:
        """Expected number of tokens of an answer."""
        if not self._ends:
            return float(self._limit)
        mean = self._made / self._ends
        return mean * -math.expm1(-self._limit / mean)

    def _count_read(self, amount: _Amount) -> float:
        return amount.prompts + self.expected_length * amount.answers_read
