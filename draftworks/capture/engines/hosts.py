"""The software that runs a target for an engine: one or several servers, or an engine in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from draftworks.errors import EngineError
from draftworks.handover.spool import AnsweredRequest, Part, PartSource, SpoolSource
from draftworks.servers.client import GenerateRequest, Generation


class GenerateClient(Protocol):
    """Interface for requests to a host: the client of one server or of several, or an engine in this process."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return answers in the order of the requests, and raise as a client of a server does."""
        ...


Client = TypeVar("Client", bound=GenerateClient)


class EngineHost(ABC, Generic[Client]):
    """Running software that serves a target.

    Attributes:
        client: sends requests to it; may be replaced by `revive`.
        spool: folder where it writes hidden states.
        layer_ids: layers whose outputs it captures, ascending.
        replicas: number of servers that share the work.
        version: version of the software.
        source: where its hidden states are read from; None = the spool.
        hand_over_timeout_s: seconds to wait for hidden states that it announced before it answered.
    """

    source: PartSource | None = None
    hand_over_timeout_s: float = 60.0
    replicas: int = 1
    version: str = ""
    client: Client
    spool: Path
    layer_ids: tuple[int, ...]

    def list_members(self) -> Sequence[EngineHost]:
        """Return the servers as single hosts."""
        return (self,)

    def take_parts(self, requests: Sequence[AnsweredRequest]) -> list[list[Part]]:
        """Return the parts of requests that it has answered; see `PartSource.take`."""
        return self.get_source().take(requests, self.hand_over_timeout_s, self.require_running)

    def discard_parts(self, request_ids: Sequence[str]) -> None:
        self.get_source().discard(request_ids)

    def measure_room(self) -> int:
        """Return the bytes of hidden states that may be on their way."""
        return self.get_source().measure_room()

    def get_source(self) -> PartSource:
        return self.source or SpoolSource(self.spool)

    def share_with_job(self) -> None:
        """Let other ranks of the job use these servers, and use those that they share."""

    def require_running(self) -> None:
        """Raise EngineError if it is known that it will write nothing any more."""

    @abstractmethod
    def revive(self, error: EngineError) -> None:
        """Make it serve again after `error`, before a request is tried again; raise EngineError if that fails."""

    @abstractmethod
    def close(self) -> None:
        """Release the host, and stop what it started."""
