"""Learning rates over optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up to the peak, then one of

    constant: the peak;
    cosine, linear: from the peak to the floor at the last step;
    wsd (warm-up, stable, decay): the peak, and linearly to the floor over the last `decay_ratio` of all steps
        (MiniCPM, arXiv 2404.06395; linear decay as in arXiv 2405.18392).

    Warm-up takes `int(warmup_ratio * total_steps)` steps, step s at (s + 1) / warmup, as in SpecForge.

    Attributes:
        peak: the highest learning rate.
        floor: the lowest after warm-up, as a share of the peak.
    """

    peak: float
    total_steps: int
    name: ScheduleName = "cosine"
    warmup_ratio: float = 0.015
    decay_ratio: float = 0.2
    floor: float = 0.0

    def lr(self, step: int) -> float:
        """Of optimizer step `step`, counted from 0."""
        return self.peak * self._share(step)

    def _share(self, step: int) -> float:
        warmup = int(self.warmup_ratio * self.total_steps)
        if step < warmup:
            return (step + 1) / warmup
        return self.floor + (1.0 - self.floor) * self._decayed(step, warmup)

    def _decayed(self, step: int, warmup: int) -> float:
        """From 1 to 0 between the end of the warm-up and the last step."""
        begin = max(warmup, self.total_steps - max(1, int(self.decay_ratio * self.total_steps)))
        if self.name == "constant" or (self.name == "wsd" and step < begin):
            return 1.0
        start = begin if self.name == "wsd" else warmup
        progress = min(1.0, (step - start) / max(1, self.total_steps - start))
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.name == "cosine" else 1.0 - progress
