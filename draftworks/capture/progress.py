"""Progress of a long run: counts, throughput, remaining time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Progress of one rank.

    Attributes:
        unit: what is counted: "samples", "conversations".
        done: how many of `total` are done, those of earlier runs included.
        share: finished share of this run's own work, 0 to 1, in the measure that best predicts the remaining time.
        tokens: number of tokens processed in this run, in `seconds`.
    """

    unit: str
    done: int
    total: int
    share: float
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Estimated remaining seconds; None before anything is done."""
        return self.seconds * (1 - self.share) / self.share if self.share else None

    def summarize(self) -> dict[str, float | int | str]:
        """Return the figures for one log line: units done, tokens per second and remaining time."""
        eta = "?" if self.eta_s is None else _format_duration(self.eta_s)
        return {self.unit: f"{self.done}/{self.total}", "tokens/s": round(self.tokens_per_s), "eta": eta}


def _format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 40s, 3m05s, 2h30m, 4d06h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


ProgressCallback = Callable[[Progress], None]
