"""Progress of a long run: counts, throughput, remaining time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where one rank stands.

    Attributes:
        unit: what is counted: "samples", "conversations".
        done: of `total`, those of earlier runs included.
        share: of this run's own work, by whatever best tells how long the rest takes; 0 to 1.
        tokens: processed in this run, in `seconds`.
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
        """None before anything is done."""
        return self.seconds * (1 - self.share) / self.share if self.share else None

    def summarize(self) -> dict[str, float | int | str]:
        """The figures worth a line of a log."""
        eta = "?" if self.eta_s is None else _format_duration(self.eta_s)
        return {self.unit: f"{self.done}/{self.total}", "tokens/s": round(self.tokens_per_s), "eta": eta}


def _format_duration(seconds: float) -> str:
    """The two largest units: 40s, 3m05s, 2h30m, 4d06h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


ProgressCallback = Callable[[Progress], None]
