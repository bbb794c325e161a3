"""Estimated quantities with bounds, and where an estimate is from."""

from __future__ import annotations

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
        return Estimate(self.low * other.low, self.value * other.value, self.high * other.high)

    def divide_by(self, rate: Estimate) -> Estimate:
        """Return the quotient, whose lower bound has the highest rate. The rate's bounds are above 0."""
        return Estimate(self.low / rate.high, self.value / rate.value, self.high / rate.low)

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
