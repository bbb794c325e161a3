"""Servers of a job of several nodes: each rank starts its own, and uses those of the other ranks too.

Ranks find each other's servers by `JobServers`. A rank starts its own servers again when they end, whoever notices.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from draftworks.capture.answers.load_balancer import CircuitBreaker, LoadBalancer
from draftworks.capture.background import run_in_background
from draftworks.capture.engines.hosts import EngineHost, GenerateClient
from draftworks.capture.engines.server_hosts import Connect, ManagedHost, ServerClient, close_all
from draftworks.capture.software import ENGINE_SOFTWARE
from draftworks.errors import DraftworksError, EngineError
from draftworks.handover.spool import AnsweredRequest, Part, PartSource, SpoolSource, is_captured
from draftworks.servers.client import GenerateRequest, Generation
from draftworks.sglang.job_servers import JobServers, ServerAddress, ServerSlot

_TESTED = {version for each in ENGINE_SOFTWARE.values() for version in each.versions}

log = logging.getLogger(__name__)


class BalancedHost(EngineHost):
    """Several servers that run the same target and capture the same layers, used as one host.

    Args:
        hosts: the servers; `close` closes them.
        spool: folder of the servers' own spools, or the one to which all of them write.
        max_outstanding: largest number of requests that one server has at a time.
        can_restart: whether the hosts' own `revive` restarts a server that has ended. It is then called for a server
            that failed too often, while the others go on, and for all servers when none is left.
        new_breaker: makes the circuit breaker of each server.
        peers: servers that others start, also after a failure; they get requests like `hosts`.
        peers_are_far: whether peers get requests only while none of `hosts` has room for them.

    Raises:
        EngineError: the servers capture different layers.
    """

    def __init__(
        self,
        hosts: Sequence[EngineHost],
        spool: Path,
        max_outstanding: int,
        can_restart: bool,
        new_breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
        peers: Sequence[EngineHost] = (),
        peers_are_far: bool = False,
    ) -> None:
        self.layer_ids = _require_common_layers(hosts)
        self.spool = spool
        self.replicas = len(hosts)
        self.version = next((host.version for host in hosts if host.version not in _TESTED), hosts[0].version)
        self.client = _BalancedClient(self)
        self._hosts = tuple(hosts)
        self._peers = tuple(peers)
        self._can_restart = can_restart
        self._closing = False
        everyone = (*hosts, *peers)
        named = {f"server {number} of {len(everyone)}": host for number, host in enumerate(everyone, start=1)}
        far = self._peers if peers_are_far else ()
        self._balancer = LoadBalancer(named, max_outstanding, new_breaker, self._note_open, far)
        self._lock = threading.RLock()
        self._answered_by: dict[str, EngineHost] = {}
        self._asked: dict[str, list[EngineHost]] = {}
        self._restarting: dict[EngineHost, Future[DraftworksError | None]] = {}

    def list_members(self) -> Sequence[EngineHost]:
        return self._hosts

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(host.client.url for host in self._hosts)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return answers in the order of the requests, which are divided among the servers by their tokens.

        Raises:
            EngineError: the engine was closed; and the errors of `LoadBalancer.run`.
        """
        if self._closing:
            raise EngineError("the servers cannot be used any more: the engine was closed")
        shares = balance([len(request.input_ids) for request in requests], self.replicas)
        if len(shares) == 1:
            return self._generate(requests)
        futures = [run_in_background(self._generate, [requests[index] for index in share]) for share in shares]
        wait(futures)  # for all of them: no file may appear in the spool after an error
        answers: list[Generation | None] = [None] * len(requests)
        for share, future in zip(shares, futures, strict=True):
            for index, answer in zip(share, future.result(), strict=True):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    def take_parts(self, requests: Sequence[AnsweredRequest]) -> list[list[Part]]:
        """Return the parts of each request from the server that answered it."""
        with self._lock:
            hosts = [self._answered_by[request.request_id] for request in requests]
        found: dict[str, list[Part]] = {}
        for host in dict.fromkeys(hosts):
            own = [request for request, answered_by in zip(requests, hosts, strict=True) if answered_by is host]
            found.update(zip((request.request_id for request in own), host.take_parts(own), strict=True))
        return [found[request.request_id] for request in requests]

    def discard_parts(self, request_ids: Sequence[str]) -> None:
        """Discard them at every server that was asked: one that failed may have written some before another answered."""
        with self._lock:
            for request_id in request_ids:
                self._answered_by.pop(request_id, None)
            asked = {host for request_id in request_ids for host in self._asked.pop(request_id, ())}
        for source in {id(host.source or host): host.get_source() for host in asked}.values():
            source.discard(request_ids)

    def measure_room(self) -> int:
        return self._hosts[0].measure_room()

    def revive(self, error: EngineError) -> None:
        """Make the servers usable after all of them failed and the caller has waited.

        Servers that Draftworks started are restarted, and this method waits for them; external ones are only made
        available for requests again.

        Raises:
            EngineError: none of the servers could be restarted.
        """
        if not self._can_restart:
            log.warning("%s\nTrying all servers again", error)
            self._balancer.reopen()
            return
        with self._lock:
            if self._balancer.has_sound_server:
                return  # since the failed request, a server has come back or answered others
            restarts = [future for host in self._hosts if (future := self._begin_restart(host, error)) is not None]
        failures = [failure for future in restarts if (failure := future.result()) is not None]
        if len(failures) == len(restarts):
            reasons = "\n".join(f"  {failure}" for failure in failures) or "  the engine was closed"
            raise EngineError(f"none of {self.replicas} servers could be restarted:\n{reasons}")

    def close(self) -> None:
        with self._lock:
            self._closing = True
            restarts = tuple(self._restarting.values())
        close_all(self._hosts, restarts)

    def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        captured = [request.request_id for request in requests if is_captured(request.request_id)]

        def generate_on(host: EngineHost) -> list[Generation]:
            with self._lock:
                for request_id in captured:
                    self._asked.setdefault(request_id, []).append(host)
            answers = host.client.generate(requests)
            with self._lock:
                self._answered_by.update((request_id, host) for request_id in captured)
            return answers

        return self._balancer.run(generate_on, len(requests))

    def _note_open(self, host: EngineHost, error: EngineError) -> None:
        if self._can_restart and host in self._hosts:
            self._begin_restart(host, error)

    def _begin_restart(self, host: EngineHost, error: EngineError) -> Future[DraftworksError | None] | None:
        """Start the restart of a server and return its future: a failure, or None on success.

        Concurrent calls share one restart. After `close` no restart begins, and the method returns None.
        """
        with self._lock:
            if self._closing:
                return None
            if host not in self._restarting:
                self._balancer.hold(host)
                self._restarting[host] = run_in_background(self._restart, host, error)
            return self._restarting[host]

    def _restart(self, host: EngineHost, error: EngineError) -> DraftworksError | None:
        restarted = False
        try:
            host.revive(error)
            restarted = True
        except DraftworksError as failure:
            log.error("a server could not be restarted: %s", failure)
            return failure
        finally:
            with self._lock:  # together: no thread may see the server as neither usable nor being restarted
                if restarted:
                    self._balancer.reopen(host)
                self._balancer.release(host)
                del self._restarting[host]
        return None


class _BalancedClient:
    """Client of a `BalancedHost`, with the interface of one server's client."""

    def __init__(self, host: BalancedHost) -> None:
        self._host = host

    @property
    def url(self) -> str:
        return ", ".join(self._host.urls)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return self._host.generate(requests)


def balance(weights: Sequence[int], shares: int) -> list[list[int]]:
    """Return the indices of the weights in at most `shares` groups of about the same sum.

    No group is empty, except the only group if there are no weights.
    """
    groups: list[list[int]] = [[] for _ in range(max(min(shares, len(weights)), 1))]
    sums = [0] * len(groups)
    for index in sorted(range(len(weights)), key=lambda each: -weights[each]):
        lightest = sums.index(min(sums))
        groups[lightest].append(index)
        sums[lightest] += weights[index]
    return groups


def _require_common_layers(hosts: Sequence[EngineHost]) -> tuple[int, ...]:
    layer_ids = {host.layer_ids for host in hosts}
    if len(layer_ids) > 1:
        each = "; ".join(f"{host.client.url}: {list(host.layer_ids)}" for host in hosts)
        raise EngineError(
            f"servers that share the work have to capture the same layers, found {each}. Start all of them with the same"
        )
    return layer_ids.pop()


LOOK_S = 1.0
"""Seconds between two looks at this rank's servers and at the addresses of the others'."""
_RESTART_AGAIN_S = 30.0
"""Seconds after which a server that could not be started again is tried once more."""


class PeerHost(EngineHost[GenerateClient]):
    """A server that another rank of the job starts, and starts again. Without an address it cannot be used."""

    def __init__(
        self, slot: ServerSlot, layer_ids: tuple[int, ...], connect: Connect, source: PartSource | None = None
    ) -> None:
        self.slot = slot
        self.layer_ids = layer_ids
        self.source = source
        self.spool = Path("/nowhere")
        self.client = _AbsentClient()
        self.name: str | None = None
        self._connect = connect
        self._opened: list[ServerClient] = []

    def follow(self, name: str, address: ServerAddress) -> None:
        """Send requests to this address from now on; those that run end as they may."""
        client = self._connect(address.url)
        self._opened.append(client)
        self.name, self.spool, self.client = name, Path(address.spool), client

    def get_source(self) -> PartSource:
        return self.source or SpoolSource(self.spool, remote=True)

    def require_running(self) -> None:
        if self._opened and self.client is self._opened[-1]:
            self._opened[-1].require_reachable()

    def revive(self, error: EngineError) -> None:
        """Do nothing: the rank that has started it starts it again."""

    def close(self) -> None:
        for client in self._opened:
            client.close()


class JobHost(BalancedHost):
    """This rank's servers of a job, which run already, and those of the other ranks, once `share_with_job` was called.

    Args:
        own: this rank's servers, as many as each other rank starts; `close` closes them.
        connect: opens a client of another rank's server, with the job's key.
        source: where hidden states of other ranks' servers are read from; None = their spools.
        spread: whether requests go to all servers alike. Else those of other ranks get requests only while none of this
            rank's has room, since their hidden states have a longer way.
    """

    def __init__(
        self,
        servers: JobServers,
        own: Sequence[ManagedHost],
        spool: Path,
        max_outstanding: int,
        connect: Connect,
        source: PartSource | None = None,
        spread: bool = False,
        look_s: float = LOOK_S,
    ) -> None:
        peers = [PeerHost(slot, own[0].layer_ids, connect, source) for slot in servers.list_peer_slots(len(own))]
        super().__init__(own, spool, max_outstanding, True, peers=peers, peers_are_far=not spread)
        if spread:
            self.replicas = len(own) + len(peers)
        self._own = tuple(own)
        self._followed = tuple(peers)
        self._servers = servers
        self._look_s = look_s
        self._ended = threading.Event()
        self._shared = False
        self._watcher = threading.Thread(target=self._watch, name="job-servers", daemon=True)
        self._restart_at = dict.fromkeys(self._own, 0.0)
        for peer in peers:
            self._balancer.hold(peer)

    def share_with_job(self) -> None:
        if self._shared or self._ended.is_set():
            return
        with self._lock:
            self._shared = True
            for number, host in enumerate(self._own):
                if host not in self._restarting:  # else its address is published when it serves again
                    self._publish(number, host)
        self._watcher.start()

    def revive(self, error: EngineError) -> None:
        """Restart this rank's servers if none is left, and let all of the job's be tried again.

        Raises:
            EngineError: none of this rank's servers could be restarted, and no other rank has a server.
        """
        try:
            super().revive(error)
        except EngineError as failure:
            if not any(peer.name for peer in self._followed):
                raise
            log.warning("%s\nTrying the servers of other ranks", failure)
        for peer in self._followed:
            if peer.name is not None:
                self._balancer.reopen(peer)

    def close(self) -> None:
        with self._lock:
            self._ended.set()
        self._withdraw(*range(len(self._own)))
        super().close()
        for peer in self._followed:
            peer.close()
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        """Start own servers that have ended again, and follow the addresses of the others, until `close`."""
        while not self._ended.wait(self._look_s):
            try:
                self._restart_ended()
                self._follow_peers()
            except OSError as error:  # of the shared file system, which may come back
                log.warning("the addresses of the job's servers cannot be read: %s", error)

    def _restart_ended(self) -> None:
        for host in self._own:
            if not host.is_running and host not in self._restarting and time.monotonic() >= self._restart_at[host]:
                self._restart_at[host] = time.monotonic() + _RESTART_AGAIN_S
                self._begin_restart(host, EngineError(f"the server at {host.client.url} has ended"))

    def _follow_peers(self) -> None:
        names = self._servers.list_names()
        for peer in self._followed:
            name = names.get(peer.slot)
            if name == peer.name:
                continue
            address = None if name is None else self._servers.read_address(name)
            if name is None or address is None:
                self._balancer.hold(peer)
                peer.name = None
                continue
            log.info("rank %d serves at %s", peer.slot.rank, address.url)
            peer.follow(name, address)
            self._balancer.reopen(peer)
            self._balancer.release(peer)

    def _restart(self, host: EngineHost, error: EngineError) -> DraftworksError | None:
        number = next(number for number, each in enumerate(self._own) if each is host)
        self._withdraw(number)
        failure = super()._restart(host, error)
        with self._lock:
            if failure is None and self._shared and not self._ended.is_set():
                self._publish(number, self._own[number])
        return failure

    def _publish(self, number: int, host: ManagedHost) -> None:
        try:
            self._servers.publish(number, ServerAddress(host.client.url, str(host.spool)))
        except OSError as error:
            log.warning("the other ranks cannot use the server at %s: %s", host.client.url, error)

    def _withdraw(self, *numbers: int) -> None:
        for number in numbers:
            try:
                self._servers.withdraw(number)
            except OSError as error:
                log.warning("the address of a server that ends could not be removed: %s", error)


class _AbsentClient:
    """Client of a server that has no address yet."""

    url = ""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        raise EngineError("a server of another rank is not there yet")
