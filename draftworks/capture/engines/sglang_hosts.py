"""The SGLang behind an engine: a server that we start and start again, one of somebody else's, or SGLang in this process."""

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

from draftworks.config.registry_files import SGLangSpec
from draftworks.errors import EngineError
from draftworks.sglang.client import GenerateRequest, Generation, SGLangClient
from draftworks.sglang.embedded import EmbeddedSGLang, require_sglang_here
from draftworks.sglang.environment import require_capturing
from draftworks.sglang.server import ServerOptions, SGLangServer

log = logging.getLogger(__name__)


class GenerateClient(Protocol):
    """What a host is asked through: the client of a server or of several, or an Engine."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """As `SGLangClient.generate`."""
        ...


Client = TypeVar("Client", bound=GenerateClient)


class SGLangHost(ABC, Generic[Client]):
    """SGLang, serving.

    Attributes:
        client: talks to it; another one after `revive`.
        spool: where it writes hidden states.
        layer_ids: layers whose outputs it captures, ascending.
        replicas: servers that share the work.
        version: of SGLang.
    """

    replicas: int = 1
    version: str = ""
    client: Client
    spool: Path
    layer_ids: tuple[int, ...]

    def members(self) -> Sequence[SGLangHost]:
        """Each server by itself."""
        return (self,)

    @abstractmethod
    def revive(self, error: EngineError) -> None:
        """Make it serve again after `error`, before a request is tried once more. Raises EngineError if it cannot."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class ManagedHost(SGLangHost[SGLangClient]):
    """A server of our own, there from `start` on and gone after `close`, which may also be called while it starts.

    Args:
        folder: ours alone: log, spool, and the link through which SGLang finds the hook. After `close` only the log is left.
    """

    def __init__(self, python: Path, options: ServerOptions, folder: Path, sglang: SGLangSpec) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._sglang = sglang
        self._server = SGLangServer(python, options, folder, sglang.start_timeout_s, sglang.grace_s)
        self.spool = options.spool
        self.layer_ids = options.layer_ids
        self._opened: SGLangClient | None = None

    def start(self) -> ManagedHost:
        """Return when it serves.

        Raises:
            ConfigError, EngineError: as `SGLangServer.start`.
        """
        shutil.rmtree(self.spool, ignore_errors=True)  # what a server before it left there, nobody waits for
        log.info("starting SGLang, its log is %s", self._server.log)
        self._server.start()
        self.version = self._server.version
        log.info("SGLang serves at %s, process %s", self._server.url, self._server.pid)
        self.client = self._opened = SGLangClient(self._server.url, self._sglang.request_timeout_s)
        return self

    @property
    def pid(self) -> int | None:
        return self._server.pid

    def revive(self, error: EngineError) -> None:
        state = "hangs" if self._server.is_running() else "has ended"
        log.warning(
            "%s\nSGLang %s and is started again. The end of its log:\n%s", error, state, self._server.read_log_tail()
        )
        self._server.stop()
        self.start()

    def close(self) -> None:
        if self._server.pid is not None:
            log.info("SGLang is ended. The end of its log:\n%s", self._server.read_log_tail())
        self._server.stop()  # first: a closed client would not wake the threads that wait for an answer
        if self._opened is not None:
            self._opened.close()
        shutil.rmtree(self.spool, ignore_errors=True)


class ExternalHost(SGLangHost[SGLangClient]):
    """A server that somebody else runs: it can be waited for, and no more."""

    def __init__(self, client: SGLangClient, spool: Path, layer_ids: tuple[int, ...]) -> None:
        self.client = client
        self.spool = spool
        self.layer_ids = layer_ids

    def revive(self, error: EngineError) -> None:
        log.warning("%s. Trying again", error)

    def close(self) -> None:
        self.client.close()


class EmbeddedHost(SGLangHost[EmbeddedSGLang]):
    """SGLang in this process, started by the constructor and gone after `close`. Both are for the main thread.

    SGLang's processes send SIGQUIT to the one that started them when one of them has failed; it would end us without a word.
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
        self._handler_before = signal.signal(signal.SIGQUIT, self._note_failure)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def revive(self, error: EngineError) -> None:
        log.warning("%s\nSGLang is started again", error)
        self.client.close()
        self.client = self._make_client()
        self._start()

    def close(self) -> None:
        self.client.close()
        shutil.rmtree(self.spool, ignore_errors=True)
        signal.signal(signal.SIGQUIT, self._handler_before)

    def _make_client(self) -> EmbeddedSGLang:
        waits = (self._sglang.start_timeout_s, self._sglang.request_timeout_s, self._sglang.grace_s)
        return EmbeddedSGLang(self._options, *waits)

    def _start(self) -> None:
        shutil.rmtree(self.spool, ignore_errors=True)
        log.info("starting SGLang in this process")
        self.client.start()

    def _note_failure(self, signum: int, frame: FrameType | None) -> None:
        self.client.fail("one of its processes failed, and said why in this log")
