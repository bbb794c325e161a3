"""The SGLang server behind an engine: one that we start and start again, or one of somebody else's."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from pathlib import Path

from draftworks.errors import EngineError
from draftworks.serving.sglang_client import SGLangClient
from draftworks.serving.sglang_server import ServerOptions, SGLangServer
from draftworks.specs import SGLangSpec

log = logging.getLogger(__name__)


class ServerHost(ABC):
    """A server that serves.

    Attributes:
        client: talks to it; another one after `revive`.
        spool: where it writes hidden states.
        layer_ids: layers whose outputs it captures, ascending.
    """

    client: SGLangClient
    spool: Path
    layer_ids: tuple[int, ...]

    @abstractmethod
    def revive(self, error: EngineError) -> None:
        """Make it serve again after `error`, before a request is tried once more. Raises EngineError if it cannot."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class ManagedHost(ServerHost):
    """A server of our own, started by the constructor and gone after `close`.

    Args:
        folder: ours alone: log, spool, and the link through which SGLang finds the hook. After `close` only the log is left.
    """

    def __init__(self, python: Path, options: ServerOptions, folder: Path, sglang: SGLangSpec) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._sglang = sglang
        self._server = SGLangServer(python, options, folder, sglang.start_timeout_s, sglang.grace_s)
        self.spool = options.spool
        self.layer_ids = options.layer_ids
        self._start()

    @property
    def pid(self) -> int | None:
        return self._server.pid

    def revive(self, error: EngineError) -> None:
        state = "hangs" if self._server.runs() else "has ended"
        log.warning(
            "%s\nSGLang %s and is started again. The end of its log:\n%s", error, state, self._server.log_tail()
        )
        self._server.stop()
        self._start()

    def close(self) -> None:
        self.client.close()
        self._server.stop()
        shutil.rmtree(self.spool, ignore_errors=True)

    def _start(self) -> None:
        shutil.rmtree(self.spool, ignore_errors=True)  # what a server before it left there, nobody waits for
        log.info("starting SGLang, its log is %s", self._server.log)
        self._server.start()
        log.info("SGLang serves at %s, process %s", self._server.url, self._server.pid)
        self.client = SGLangClient(self._server.url, self._sglang.request_timeout_s)


class ExternalHost(ServerHost):
    """A server that somebody else runs: it can be waited for, and no more."""

    def __init__(self, client: SGLangClient, spool: Path, layer_ids: tuple[int, ...]) -> None:
        self.client = client
        self.spool = spool
        self.layer_ids = layer_ids

    def revive(self, error: EngineError) -> None:
        log.warning("%s. Trying again", error)

    def close(self) -> None:
        self.client.close()
