"""How far a run that takes a while has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where one rank stands.

    Attributes:
        unit: what is counted: "samples".
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

    def line(self) -> dict[str, float | int | str]:
        """The figures worth a line of a log."""
        eta = "?" if self.eta_s is None else f"{self.eta_s:.0f}s"
        return {self.unit: f"{self.done}/{self.total}", "tokens/s": round(self.tokens_per_s), "eta": eta}


ProgressCallback = Callable[[Progress], None]
