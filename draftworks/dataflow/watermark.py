"""How far producers may run ahead of a consumer: one rule for channels, queues and stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from draftworks.errors import ConfigError, StoreError
from draftworks.features.contracts import SampleRef

POLL_S = 0.05
"""Pause between two looks at the other side, which may be on another machine."""


@dataclass(frozen=True)
class InFlight:
    """What was produced and is not consumed yet; `steps` is None where nobody counts optimizer steps."""

    samples: int = 0
    bytes: int = 0
    steps: int | None = None

    @classmethod
    def of(cls, refs: Iterable[SampleRef]) -> InFlight:
        sizes = [ref.estimated_bytes for ref in refs]
        return cls(len(sizes), sum(sizes))

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

    def has_room(self, in_flight: InFlight, more: InFlight) -> bool:
        """Whether `more` may be produced beside what is in flight, without exceeding a limit.

        Raises:
            ValueError: `steps` is limited and `in_flight` does not count them.
        """
        if self.steps is not None and in_flight.steps is None:
            raise ValueError("the watermark limits steps, but steps in flight are not counted: use for_batches_of")
        total = in_flight + more
        limits = ((self.samples, total.samples), (self.bytes, total.bytes), (self.steps, total.steps))
        return all(limit is None or found is None or found <= limit for limit, found in limits)

    def require_piece(self, more: InFlight) -> None:
        """Raise StoreError if `more` exceeds a limit even with nothing else in flight."""
        if not self.has_room(InFlight(steps=0), more):
            raise StoreError(
                f"{more} are more than the watermark ever lets through ({self}). Produce in smaller pieces, or raise "
                "the watermark"
            )


def wait_for_room(
    watermark: Watermark,
    read_in_flight: Callable[[], InFlight],
    more: InFlight,
    *,
    timeout_s: float,
    describe_sides: Callable[[], str],
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until `more` may be produced; return False if `should_stop` said so first.

    Args:
        read_in_flight: may raise what ended the other side, which ends the wait.
        timeout_s: limit for the time in which nothing at all is consumed.

    Raises:
        StoreError: nothing was consumed for `timeout_s` seconds, or `more` can never be produced.
    """
    watermark.require_piece(more)
    before, since = None, time.monotonic()
    while not should_stop():
        in_flight = read_in_flight()
        if watermark.has_room(in_flight, more):
            return True
        if in_flight != before:
            before, since = in_flight, time.monotonic()
        if time.monotonic() - since > timeout_s:
            raise StoreError(
                f"nothing was consumed for {timeout_s:g} s, with {in_flight} in flight and no room below the watermark: "
                f"{describe_sides()}. Look at the consumer's log, or raise the idle timeout"
            )
        time.sleep(min(POLL_S, timeout_s / 4))
    return False
