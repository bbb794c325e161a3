"""SGLang servers of a job of several nodes: each rank starts its own, and uses those of the other ranks too.

Ranks find each other's servers by `JobServers`. A rank starts its own servers again when they end, whoever notices.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from draftworks.capture.engines.sglang_balancing import BalancedHost
from draftworks.capture.engines.sglang_hosts import GenerateClient, ManagedHost, SGLangHost
from draftworks.errors import DraftworksError, EngineError
from draftworks.sglang.client import GenerateRequest, Generation, SGLangClient
from draftworks.sglang.job_servers import JobServers, ServerAddress, ServerSlot
from draftworks.sglang.parts import PartSource
from draftworks.sglang.spool import SpoolSource

LOOK_S = 1.0
"""Seconds between two looks at this rank's servers and at the addresses of the others'."""
_RESTART_AGAIN_S = 30.0
"""Seconds after which a server that could not be started again is tried once more."""

log = logging.getLogger(__name__)


class PeerHost(SGLangHost[GenerateClient]):
    """A server that another rank of the job starts, and starts again. Without an address it cannot be used."""

    def __init__(
        self, slot: ServerSlot, layer_ids: tuple[int, ...], timeout_s: float, key: str, source: PartSource | None = None
    ) -> None:
        self.slot = slot
        self.layer_ids = layer_ids
        self.source = source
        self.spool = Path("/nowhere")
        self.client = _AbsentClient()
        self.name: str | None = None
        self._timeout_s = timeout_s
        self._key = key
        self._opened: list[SGLangClient] = []

    def follow(self, name: str, address: ServerAddress) -> None:
        """Send requests to this address from now on; those that run end as they may."""
        client = SGLangClient(address.url, self._timeout_s, self._key)
        self._opened.append(client)
        self.name, self.spool, self.client = name, Path(address.spool), client

    def get_source(self) -> PartSource:
        return self.source or SpoolSource(self.spool, remote=True)

    def require_running(self) -> None:
        if isinstance(self.client, SGLangClient):
            self.client.require_reachable()

    def revive(self, error: EngineError) -> None:
        """Do nothing: the rank that has started it starts it again."""

    def close(self) -> None:
        for client in self._opened:
            client.close()


class JobHost(BalancedHost):
    """This rank's servers of a job, which run already, and those of the other ranks, once `share_with_job` was called.

    Args:
        own: this rank's servers, as many as each other rank starts; `close` closes them.
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
        timeout_s: float,
        source: PartSource | None = None,
        spread: bool = False,
        look_s: float = LOOK_S,
    ) -> None:
        key = servers.read_key()
        peers = [PeerHost(slot, own[0].layer_ids, timeout_s, key, source) for slot in servers.list_peer_slots(len(own))]
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

    def _restart(self, host: SGLangHost, error: EngineError) -> DraftworksError | None:
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
