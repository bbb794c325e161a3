"""How far producers may run ahead of a consumer: one rule for planned streams and those in arrival order."""

from __future__ import annotations

from dataclasses import dataclass, fields

from draftworks.errors import ConfigError

IDLE_TIMEOUT_S = 1800.0
"""The longest that one side of a stream waits while the other does nothing."""


@dataclass(frozen=True)
class InFlight:
    """What was produced and is not consumed yet; `steps` is None where nobody counts optimizer steps."""

    samples: int = 0
    bytes: int = 0
    steps: int | None = None

    def __add__(self, other: InFlight) -> InFlight:
        steps = None if self.steps is None and other.steps is None else (self.steps or 0) + (other.steps or 0)
        return InFlight(self.samples + other.samples, self.bytes + other.bytes, steps)

    def __sub__(self, other: InFlight) -> InFlight:
        steps = None if self.steps is None else self.steps - (other.steps or 0)
        return InFlight(self.samples - other.samples, self.bytes - other.bytes, steps)

    def __str__(self) -> str:
        steps = "" if self.steps is None else f", {self.steps} steps"
        return f"{self.samples} samples, {self.bytes:,} bytes{steps}"


@dataclass(frozen=True)
class Watermark:
    """Upper limits of what is in flight; None does not limit.

    A consumer frees room only after a whole optimizer step, so a limit below one global batch would stop both sides for
    ever: `require_batch` refuses it.

    Raises:
        ConfigError: a limit is not positive, or there is none.
    """

    samples: int | None = 256
    bytes: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        if all(limit is None for limit in limits.values()):
            raise ConfigError("watermark: expected a limit of samples, bytes or steps, found none")
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise ConfigError(f"watermark.{name}: expected at least 1, found {limit}")

    def require_batch(self, batch: InFlight) -> Watermark:
        """Return the watermark if `batch`, the most that one optimizer step takes, fits below it; else ConfigError."""
        for field in fields(self):
            limit, needed = getattr(self, field.name), getattr(batch, field.name)
            if limit is not None and needed is not None and needed > limit:
                raise ConfigError(
                    f"watermark.{field.name}: expected at least one global batch, {needed:,}, found {limit:,}. The "
                    f"producer would wait for room, and the trainer for the rest of the batch. Raise it to {needed:,} "
                    "or more, or lower training.global_batch_size"
                )
        return self

    def for_batches_of(self, samples: int) -> Watermark:
        """Return the watermark with `steps` expressed in samples, for streams that count no steps."""
        if self.steps is None:
            return self
        limit = self.steps * samples
        return Watermark(limit if self.samples is None else min(self.samples, limit), self.bytes)
