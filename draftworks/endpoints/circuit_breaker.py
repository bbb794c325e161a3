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
    """State of a breaker.

    CLOSED: requests pass. OPEN: no request passes. HALF_OPEN: the cool-down is over, and one trial request may pass.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Circuit breaker for one server, for any number of threads.

    A caller that `allow` let through has to report the outcome: `record_success`, `record_failure` or
    `record_abandoned`.

    Args:
        failures: number of failures in a row that open the breaker.
        cooldown_s: seconds until an open breaker allows a trial request; a failed trial opens it for the same time
            again.
        clock: monotonic clock in seconds.
    """

    def __init__(self, failures: int = FAILURES, cooldown_s: float = COOLDOWN_S, clock: Clock = time.monotonic) -> None:
        if failures < 1:
            raise ValueError(f"failures: expected 1 or more, found {failures}")
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
        """Whether no failure was recorded since the last success."""
        with self._lock:
            return self._failures == 0

    @property
    def is_available(self) -> bool:
        """Whether `allow` would let a request through now."""
        with self._lock:
            state = self.state
            return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial)

    def allow(self) -> bool:
        """Return whether a request may pass; the first request to a half-open breaker becomes the trial."""
        with self._lock:
            if not self.is_available:
                return False
            self._trial = self.state is BreakerState.HALF_OPEN
            return True

    def record_success(self) -> None:
        """Record a success, which closes the breaker from any state."""
        with self._lock:
            self._failures = 0
            self._opened_at = None
            self._trial = False

    def record_failure(self) -> bool:
        """Record a failure and return whether it opened the breaker.

        Failures reported while the breaker is open, of requests sent before it opened, change nothing.
        """
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
        """Record that a request's outcome is unknown; another request may become the trial."""
        with self._lock:
            self._trial = False
