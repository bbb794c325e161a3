"""A circuit breaker: after several failures in a row it blocks requests for a while, then allows one trial request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

FAILURES = 3
COOLDOWN_S = 30.0

Clock = Callable[[], float]


class BreakerState(Enum):
    """CLOSED: requests pass. OPEN: none does. HALF_OPEN: the cool-down is over, and one may try."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Whoever was let through by `allow` says what came of it: `succeeded`, `failed`, or `abandoned`. For any number of threads.

    Args:
        failures: in a row, that open it.
        cooldown_s: until an open one lets a trial through; a trial that fails opens it anew, for as long again.
        clock: seconds, never going back.
    """

    def __init__(self, failures: int = FAILURES, cooldown_s: float = COOLDOWN_S, clock: Clock = time.monotonic) -> None:
        if failures < 1:
            raise ValueError(f"a breaker opens after 1 failure or more, found {failures}")
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.RLock()
        self._failures = 0
        self._opened_at: float | None = None
        self._trial = False

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._opened_at is None:
                return BreakerState.CLOSED
            cooled = self._clock() - self._opened_at >= self._cooldown_s
            return BreakerState.HALF_OPEN if cooled else BreakerState.OPEN

    @property
    def is_sound(self) -> bool:
        """Whether nothing has failed since it last worked."""
        with self._lock:
            return self._failures == 0

    @property
    def is_available(self) -> bool:
        """Whether `allow` would let a request through now."""
        with self._lock:
            state = self.state
            return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial)

    def allow(self) -> bool:
        """Let a request through, or not. Of a half-open one the first to ask becomes the trial."""
        with self._lock:
            if not self.is_available:
                return False
            self._trial = self.state is BreakerState.HALF_OPEN
            return True

    def record_success(self) -> None:
        """It works: closed, whatever was before."""
        with self._lock:
            self._failures = 0
            self._opened_at = None
            self._trial = False

    def record_failure(self) -> bool:
        """Note a failure; whether it opened the breaker. One that was on its way when it opened changes nothing."""
        with self._lock:
            state = self.state
            if state is BreakerState.OPEN:
                return False
            self._failures += 1
            self._trial = False
            if state is BreakerState.CLOSED and self._failures < self._limit:
                return False
            self._opened_at = self._clock()
            return True

    def record_abandoned(self) -> None:
        """Nobody knows what came of it: another may try."""
        with self._lock:
            self._trial = False
