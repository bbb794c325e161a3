"""A clock for modules that wait: it stands for the `time` module that they have imported."""

from __future__ import annotations


class PausedTime:
    """Time that goes by in pauses only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
