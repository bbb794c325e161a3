"""Estimated quantities with bounds, and where an estimate is from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

SourceKind = Literal["measured", "scaled", "documented", "counted"]
RANK: tuple[SourceKind, ...] = ("counted", "measured", "scaled", "documented")
"""From the surest to the least sure."""


@dataclass(frozen=True)
class Estimate:
    """A quantity that is not negative: its likely value, and the bounds that are expected to hold it.

    Raises ValueError unless 0 <= low <= value <= high.
    """

    low: float
    value: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high:
            raise ValueError(f"expected 0 <= low <= value <= high, found {self.low}, {self.value}, {self.high}")

    @classmethod
    def exactly(cls, value: float) -> Estimate:
        return cls(value, value, value)

    @classmethod
    def within(cls, value: float, factor: float) -> Estimate:
        """From a value that may be off by a factor, at least 1, either way."""
        return cls(value / factor, value, value * factor)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.low + other.low, self.value + other.value, self.high + other.high)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.low * factor, self.value * factor, self.high * factor)

    def times(self, other: Estimate) -> Estimate:
        """Return the product of two estimates whose errors do not depend on each other, see `_combine`."""
        return _combine(
            self.value * other.value,
            [_Spread.of(self), _Spread.of(other)],
            Estimate(self.low * other.low, self.value * other.value, self.high * other.high),
        )

    def multiply(self, other: Estimate) -> Estimate:
        """Return the product of two estimates whose bounds may be met together, as those that are limits."""
        return Estimate(self.low * other.low, self.value * other.value, self.high * other.high)

    def divide_by(self, rate: Estimate) -> Estimate:
        """Return the quotient, whose lower bound has the higher rate; errors as in `times`. The rate is above 0."""
        spread = _Spread.of(rate)
        return _combine(
            self.value / rate.value,
            [_Spread.of(self), _Spread(spread.up, spread.down)],
            Estimate(self.low / rate.high, self.value / rate.value, self.high / rate.low),
        )

    def cap(self, limit: float) -> Estimate:
        return Estimate(min(self.low, limit), min(self.value, limit), min(self.high, limit))

    def subtract(self, amount: float) -> Estimate:
        """Return what is left after `amount`, at least 0."""
        return Estimate(*(max(each - amount, 0.0) for each in (self.low, self.value, self.high)))

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Estimate:
        """Raises TypeError, KeyError or ValueError if it is none."""
        return cls(*(float(found[name]) for name in ("low", "value", "high")))


NOTHING = Estimate.exactly(0.0)


@dataclass(frozen=True)
class _Spread:
    """How far the bounds of an estimate are from its value, as logarithms of their ratios."""

    down: float
    up: float

    @classmethod
    def of(cls, found: Estimate) -> _Spread:
        if not found.low:
            return cls(math.inf if found.value else 0.0, math.log(found.high / found.value) if found.value else 0.0)
        return cls(math.log(found.value / found.low), math.log(found.high / found.value))


def _combine(value: float, spreads: list[_Spread], extremes: Estimate) -> Estimate:
    """Return an estimate around a value. Independent errors rarely meet at their bounds, so squares of spreads add up.

    Args:
        extremes: what the bounds are if they do meet; never exceeded.
    """
    if not value:
        return extremes
    low = value * math.exp(-math.hypot(*(each.down for each in spreads)))
    high = value * math.exp(math.hypot(*(each.up for each in spreads)))
    return Estimate(min(max(low, extremes.low), value), value, max(min(high, extremes.high), value))


@dataclass(frozen=True)
class Source:
    """Where a figure is from.

    Attributes:
        kind: counted from what exists or is written in the registry; measured by runs of this target; scaled from another
            target of this deployment; documented: somebody else's figure, or one of docs/benchmarks.md.
        text: the same in words, with run and date.
    """

    kind: SourceKind
    text: str

    def or_worse(self, other: Source) -> Source:
        """Return the less sure of the two."""
        return max(self, other, key=lambda each: RANK.index(each.kind))
