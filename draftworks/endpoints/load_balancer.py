"""Load balancing over equivalent servers: requests go to the least busy one, and not to servers that fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftworks.endpoints.circuit_breaker import BreakerState, CircuitBreaker
from draftworks.errors import CaptureError, EngineError, PassingTroubleError

Client = TypeVar("Client")
Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass
class Server(Generic[Client]):
    """One of them. `outstanding` requests are on their way to it, `taken` is all it was ever given; one that is `held` gets
    nothing, not even a trial.
    """

    name: str
    client: Client
    breaker: CircuitBreaker
    outstanding: int = 0
    taken: int = 0
    held: bool = False
    error: EngineError | None = None

    @property
    def is_usable(self) -> bool:
        return not self.held and self.breaker.is_available

    @property
    def is_out(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.held or self.breaker.state is BreakerState.OPEN

    def has_room(self, requests: int, limit: int) -> bool:
        """More than the limit fits only where nothing else is."""
        return self.outstanding == 0 or self.outstanding + requests <= limit


class LoadBalancer(Generic[Client]):
    """Servers side by side, for any number of threads.

    Args:
        clients: by the name under which logs and errors know them.
        max_outstanding: requests that a server has at a time; whoever has more waits until there is room somewhere.
        new_breaker: makes the breaker of each.
        on_open: called with the client and its error when it has failed so often that it gets no more work for a while.
    """

    def __init__(
        self,
        clients: Mapping[str, Client],
        max_outstanding: int,
        new_breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
        on_open: Callable[[Client, EngineError], None] = lambda client, error: None,
    ) -> None:
        self.servers = tuple(Server(name, client, new_breaker()) for name, client in clients.items())
        self._limit = max_outstanding
        self._on_open = on_open
        self._changed = threading.Condition()

    def run(self, work: Callable[[Client], Result], requests: int = 1) -> Result:
        """What `work` returns for one of the servers, tried on each until one does it.

        Args:
            requests: that `work` sends.

        Raises:
            EngineError: no server is left to try; the message has the last error of each.
            CaptureError: a server refused the work, as any of them would.
        """
        tried: set[str] = set()
        while True:
            server = self._take_server(requests, tried)
            try:
                result = work(server.client)
            except PassingTroubleError as error:
                server.breaker.record_success()  # it lives: whoever asked waits a little, unless another one does it
                tried.add(server.name)
                if len(tried) == len(self.servers):
                    raise
                log.warning("%s", error)
            except EngineError as error:
                tried.add(server.name)
                self._note_failure(server, error)
            except CaptureError:
                server.breaker.record_success()  # it lives, and has answered
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
        """Give a server work again because it was mended, or all of them because whoever asks has waited long enough."""
        with self._changed:
            for server in self.servers:
                if client is None or server.client is client:
                    server.breaker.record_success()
            self._changed.notify_all()

    @property
    def has_sound_server(self) -> bool:
        """Whether a server may be asked of which no failure is known since it last worked or was mended."""
        with self._changed:
            return any(each.is_usable and each.breaker.is_sound for each in self.servers)

    def hold(self, client: Client) -> None:
        """Give a server no work until it is released, whatever its breaker says."""
        self._set_held(client, True)

    def release(self, client: Client) -> None:
        """Leave it to its breaker again."""
        self._set_held(client, False)

    def _set_held(self, client: Client, held: bool) -> None:
        with self._changed:
            for server in self.servers:
                if server.client is client:
                    server.held = held
            self._changed.notify_all()

    def _take_server(self, requests: int, tried: Collection[str]) -> Server[Client]:
        """The one with the least to do among those that may be asked, once there is room at any of them."""
        with self._changed:
            while True:
                untried = [each for each in self.servers if each.name not in tried]
                usable = [each for each in untried if each.is_usable]
                for server in sorted(usable, key=lambda each: (each.outstanding, each.taken)):
                    if server.has_room(requests, self._limit) and server.breaker.allow():
                        server.outstanding += requests
                        server.taken += requests
                        return server
                if all(each.is_out for each in untried):
                    raise self._make_exhausted_error()
                self._changed.wait()  # for room, or for what comes of a trial

    def _release(self, server: Server[Client], requests: int) -> None:
        with self._changed:
            server.outstanding -= requests
            self._changed.notify_all()

    def _note_failure(self, server: Server[Client], error: EngineError) -> None:
        server.error = error
        opened = server.breaker.record_failure()
        log.warning("%s%s", error, f"\n{server.name} gets no work for now" if opened else "")
        if opened:
            self._on_open(server.client, error)

    def _make_exhausted_error(self) -> EngineError:
        lines = [f"  {each.name}: {each.error}" for each in self.servers]
        return EngineError("\n".join([f"none of {len(lines)} servers does the work:", *lines]))
