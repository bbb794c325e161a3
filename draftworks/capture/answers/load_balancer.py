"""Load balancing over equivalent servers: requests go to the least busy one, and not to servers that fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from draftworks.errors import CaptureError, EngineError, PassingTroubleError

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


Client = TypeVar("Client")
Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass
class Server(Generic[Client]):
    """State of one server behind the load balancer.

    Attributes:
        name: name of the server in logs and errors.
        outstanding: number of requests that it has not answered yet.
        total_requests: number of all requests that it was ever given.
        held: whether it gets no requests, not even a trial request.
        error: its last failure; None if there was none.
    """

    name: str
    client: Client
    breaker: CircuitBreaker
    outstanding: int = 0
    total_requests: int = 0
    held: bool = False
    error: EngineError | None = None

    @property
    def is_usable(self) -> bool:
        return not self.held and self.breaker.is_available

    @property
    def is_unavailable(self) -> bool:
        """Whether the server is held or its breaker is open, so that waiting for it is useless."""
        return self.held or self.breaker.state is BreakerState.OPEN

    def has_room(self, requests: int, limit: int) -> bool:
        """Return whether the server can take `requests` more; more than the limit fits only if it has no other."""
        return self.outstanding == 0 or self.outstanding + requests <= limit


class LoadBalancer(Generic[Client]):
    """Load balancer over equivalent servers, for any number of threads.

    Args:
        clients: client of each server, by the server's name in logs and errors.
        max_outstanding: maximum number of requests that a server has at a time; callers wait until one has room.
        new_breaker: creates the circuit breaker of each server.
        on_open: called with the client and its error when a failure opens the breaker, so that it gets no work for a
            while.
        far: clients of servers that get requests only while no other has room for them.
    """

    def __init__(
        self,
        clients: Mapping[str, Client],
        max_outstanding: int,
        new_breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
        on_open: Callable[[Client, EngineError], None] = lambda client, error: None,
        far: Collection[Client] = (),
    ) -> None:
        self.servers = tuple(Server(name, client, new_breaker()) for name, client in clients.items())
        self._limit = max_outstanding
        self._on_open = on_open
        self._far = {id(client) for client in far}
        self._changed = threading.Condition()

    def run(self, work: Callable[[Client], Result], requests: int = 1) -> Result:
        """Return the result of `work` for one of the servers; on an engine error, try the next server.

        Args:
            requests: number of requests that `work` sends.

        Raises:
            EngineError: no server is left to try; the message has the last error of each.
            PassingTroubleError: all servers that are available were tried, and the last one failed only temporarily.
            CaptureError: a server refused the work, as all of them would.
        """
        tried: set[str] = set()
        while True:
            server = self._take_server(requests, tried)
            try:
                result = work(server.client)
            except PassingTroubleError as error:
                server.breaker.record_success()  # the server is up: try another one, else the caller waits
                tried.add(server.name)
                if not self._has_untried(tried):
                    raise
                log.warning("%s", error)
            except EngineError as error:
                tried.add(server.name)
                self._note_failure(server, error)
            except CaptureError:
                server.breaker.record_success()  # the server is up and has answered
                raise
            except BaseException:
                server.breaker.record_abandoned()
                raise
            else:
                server.breaker.record_success()
                return result
            finally:
                self._release(server, requests)

    def reopen(self, client: Client | None = None) -> None:
        """Close the breaker of a server, or of all servers if `client` is None, so that it gets work again.

        A single server is reopened after its repair, all servers when the caller has waited long enough.
        """
        with self._changed:
            for server in self.servers:
                if client is None or server.client is client:
                    server.breaker.record_success()
            self._changed.notify_all()

    @property
    def has_sound_server(self) -> bool:
        """Whether a usable server has no recorded failure since its last success or its reopening."""
        with self._changed:
            return any(each.is_usable and each.breaker.is_sound for each in self.servers)

    def hold(self, client: Client) -> None:
        """Give a server no work until `release`, whatever the state of its breaker."""
        self._set_held(client, True)

    def release(self, client: Client) -> None:
        """End a `hold`: the server's breaker decides again whether it gets work."""
        self._set_held(client, False)

    def _set_held(self, client: Client, held: bool) -> None:
        with self._changed:
            for server in self.servers:
                if server.client is client:
                    server.held = held
            self._changed.notify_all()

    def _take_server(self, requests: int, tried: Collection[str]) -> Server[Client]:
        """Wait until an untried usable server has room, and return the least busy one with the requests assigned to it.

        Raises:
            EngineError: all untried servers are held or their breakers are open, or none is left to try.
        """
        with self._changed:
            while True:
                untried = [each for each in self.servers if each.name not in tried]
                usable = [each for each in untried if each.is_usable]
                for server in sorted(usable, key=self._sort_key):
                    if server.has_room(requests, self._limit) and server.breaker.allow():
                        server.outstanding += requests
                        server.total_requests += requests
                        return server
                if all(each.is_unavailable for each in untried):
                    raise self._make_exhausted_error()
                self._changed.wait()  # for room, or for the outcome of a trial request

    def _sort_key(self, server: Server[Client]) -> tuple[bool, int, int]:
        return id(server.client) in self._far, server.outstanding, server.total_requests

    def _has_untried(self, tried: Collection[str]) -> bool:
        with self._changed:
            return any(each.name not in tried and not each.is_unavailable for each in self.servers)

    def _release(self, server: Server[Client], requests: int) -> None:
        with self._changed:
            server.outstanding -= requests
            self._changed.notify_all()

    def _note_failure(self, server: Server[Client], error: EngineError) -> None:
        server.error = error
        opened = server.breaker.record_failure()
        log.warning("%s%s", error, f"\n{server.name} gets no requests for now" if opened else "")
        if opened:
            self._on_open(server.client, error)

    def _make_exhausted_error(self) -> EngineError:
        lines = [f"  {each.name}: {each.error or 'it has not served yet'}" for each in self.servers]
        return EngineError("\n".join([f"none of {len(lines)} servers is available:", *lines]))
