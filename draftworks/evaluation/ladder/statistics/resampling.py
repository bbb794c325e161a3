"""Settings of a resampling, and a confidence interval. No numpy."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.errors import ConfigError


@dataclass(frozen=True)
class Resampling:
    """Settings of a bootstrap: confidence level, number of resamples, seed."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence: expected a level between 0 and 1 such as 0.95, found {self.confidence}")
        if self.resamples < 1:
            raise ConfigError(f"resamples: expected 1 or more, found {self.resamples}")


DEFAULT_RESAMPLING = Resampling()


@dataclass(frozen=True)
class Interval:
    """Confidence interval at the level `confidence`."""

    low: float
    high: float
    confidence: float

    @property
    def has_width(self) -> bool:
        """Whether it says anything: observations that are all alike, or a single one, do not show how far others lie."""
        return self.high > self.low
