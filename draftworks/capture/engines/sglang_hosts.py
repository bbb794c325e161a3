"""SGLang hosts of an engine: a server that Draftworks starts and restarts, an external one, or one in this process."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Generic, Protocol, TypeVar

from draftworks.config.sglang import SGLangSpec
from draftworks.errors import EngineError
from draftworks.sglang.client import GenerateRequest, Generation, SGLangClient
from draftworks.sglang.embedded import EmbeddedSGLang, require_sglang_here
from draftworks.sglang.environment import require_capturing
from draftworks.sglang.parts import AnsweredRequest, Part, PartSource
from draftworks.sglang.server import ServerOptions, SGLangServer
from draftworks.sglang.spool import SpoolSource

log = logging.getLogger(__name__)


class GenerateClient(Protocol):
    """Interface for requests to a host: the client of one server or of several, or SGLang's Engine in this process."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return answers in the order of the requests, like `SGLangClient.generate`."""
        ...


Client = TypeVar("Client", bound=GenerateClient)


class SGLangHost(ABC, Generic[Client]):
    """A running SGLang that serves a target.

    Attributes:
        client: sends requests to it; may be replaced by `revive`.
        spool: folder where it writes hidden states.
        layer_ids: layers whose outputs it captures, ascending.
        replicas: number of servers that share the work.
        version: version of SGLang.
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

    def list_members(self) -> Sequence[SGLangHost]:
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
        """Make SGLang serve again after `error`, before a request is tried again; raise EngineError if that fails."""

    @abstractmethod
    def close(self) -> None:
        """Release the host, and stop what it started."""


class ManagedHost(SGLangHost[SGLangClient]):
    """A server that Draftworks runs: started by `start` and stopped by `close`, which may be called while it starts.

    Args:
        folder: used by this host only: log, spool, and the link through which SGLang finds the hook. After `close` only
            the log is left.
    """

    def __init__(self, python: Path, options: ServerOptions, folder: Path, sglang: SGLangSpec) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._sglang = sglang
        self._key = options.read_key()
        self._server = SGLangServer(python, options, folder, sglang.start_timeout_s, sglang.grace_s)
        self.spool = options.spool
        self.layer_ids = options.layer_ids
        self._open_client: SGLangClient | None = None

    def start(self) -> ManagedHost:
        """Start the server and return when it serves.

        Raises:
            ConfigError, EngineError: see `SGLangServer.start`.
        """
        shutil.rmtree(self.spool, ignore_errors=True)  # files of an earlier server; no request waits for them
        log.info("starting SGLang, its log is %s", self._server.log)
        self._server.start()
        self.version = self._server.version
        log.info("SGLang serves at %s, process %s", self._server.url, self._server.pid)
        self.client = self._open_client = SGLangClient(self._server.url, self._sglang.request_timeout_s, self._key)
        return self

    @property
    def pid(self) -> int | None:
        return self._server.pid

    @property
    def is_running(self) -> bool:
        return self._server.is_running()

    def require_running(self) -> None:
        if not self._server.is_running():
            raise EngineError(f"SGLang ended before it had written what it announced. See {self._server.log}")

    def revive(self, error: EngineError) -> None:
        state = "hangs" if self._server.is_running() else "has ended"
        log.warning(
            "%s\nSGLang %s and is restarted. The end of its log:\n%s", error, state, self._server.read_log_tail()
        )
        self._server.stop()
        self.start()

    def close(self) -> None:
        if self._server.pid is not None:
            log.info("stopping SGLang. The end of its log:\n%s", self._server.read_log_tail())
        self._server.stop()  # first: closing the client would not wake threads that wait for an answer
        if self._open_client is not None:
            self._open_client.close()
        shutil.rmtree(self.spool, ignore_errors=True)


class ExternalHost(SGLangHost[SGLangClient]):
    """An external server, which Draftworks did not start: after an error, requests to it can only be tried again."""

    def __init__(self, client: SGLangClient, spool: Path, layer_ids: tuple[int, ...]) -> None:
        self.client = client
        self.spool = spool
        self.layer_ids = layer_ids

    def require_running(self) -> None:
        self.client.require_reachable()

    def revive(self, error: EngineError) -> None:
        log.warning("%s. Trying again", error)

    def close(self) -> None:
        self.client.close()


class EmbeddedHost(SGLangHost[EmbeddedSGLang]):
    """SGLang in this process, started by the constructor and stopped by `close`; call both in the main thread.

    When one of SGLang's processes fails, it sends SIGQUIT to the process that started it. Without a handler, the signal
    would end this process without a message.
    """

    def __init__(self, options: ServerOptions, sglang: SGLangSpec) -> None:
        self._options = options
        self._sglang = sglang
        self.spool = options.spool
        self.layer_ids = options.layer_ids
        self.version = require_sglang_here()
        if options.layer_ids:
            require_capturing(self.version, f"this Python, {sys.executable},")
        self.client = self._make_client()
        self._previous_handler = signal.signal(signal.SIGQUIT, self._note_failure)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def require_running(self) -> None:
        self.client.require_sound()

    def revive(self, error: EngineError) -> None:
        log.warning("%s\nSGLang is restarted", error)
        self.client.close()
        self.client = self._make_client()
        self._start()

    def close(self) -> None:
        self.client.close()
        shutil.rmtree(self.spool, ignore_errors=True)
        signal.signal(signal.SIGQUIT, self._previous_handler)

    def _make_client(self) -> EmbeddedSGLang:
        timeouts = (self._sglang.start_timeout_s, self._sglang.request_timeout_s, self._sglang.grace_s)
        return EmbeddedSGLang(self._options, *timeouts)

    def _start(self) -> None:
        shutil.rmtree(self.spool, ignore_errors=True)
        log.info("starting SGLang in this process")
        self.client.start()

    def _note_failure(self, signum: int, frame: FrameType | None) -> None:
        self.client.fail("one of its processes failed; its own messages are in this log")
