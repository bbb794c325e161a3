"""Servers as hosts of an engine, started here or external, and their test requests; what software they are, clients know."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from draftworks.capture.background import run_in_background
from draftworks.capture.engine import TargetEngine
from draftworks.capture.engines.hosts import EngineHost, GenerateClient
from draftworks.capture.verify import check_head
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.servers.process import ServerProcess

_CLOSE_AGAIN_S = 0.5

log = logging.getLogger(__name__)


class ServerClient(GenerateClient, Protocol):
    """Client of one server."""

    url: str

    def require_reachable(self) -> None:
        """Raise EngineError if the server cannot be connected to."""
        ...

    def close(self) -> None: ...


Server = TypeVar("Server", bound=ServerClient)
Connect = Callable[[str], ServerClient]
"""Opens a client of the server at a URL."""


class ManagedHost(EngineHost[ServerClient]):
    """A server that Draftworks runs: started by `start` and stopped by `close`, which may be called while it starts.

    Args:
        server: not started. Its folder is used by this host only; after `close` only the log is left.
        spool: folder that it writes hidden states to; emptied whenever it is started.
        layer_ids: layers whose outputs it captures, ascending.
    """

    def __init__(self, server: ServerProcess[Any], connect: Connect, spool: Path, layer_ids: tuple[int, ...]) -> None:
        self._server = server
        self._connect = connect
        self.spool = spool
        self.layer_ids = layer_ids
        self._open_client: ServerClient | None = None

    def start(self) -> ManagedHost:
        """Start the server and return when it serves.

        Raises:
            ConfigError, EngineError: see `ServerProcess.start`.
        """
        name = self._server.SOFTWARE.name
        shutil.rmtree(self.spool, ignore_errors=True)  # files of an earlier server; no request waits for them
        self.spool.mkdir(parents=True)
        log.info("starting %s, its log is %s", name, self._server.log)
        self._server.start()
        self.version = self._server.version
        log.info("%s serves at %s, process %s", name, self._server.url, self._server.pid)
        self.client = self._open_client = self._connect(self._server.url)
        return self

    @property
    def pid(self) -> int | None:
        return self._server.pid

    @property
    def is_running(self) -> bool:
        return self._server.is_running()

    def require_running(self) -> None:
        if not self._server.is_running():
            name = self._server.SOFTWARE.name
            raise EngineError(f"{name} ended before it had written what it announced. See {self._server.log}")

    def revive(self, error: EngineError) -> None:
        state = "hangs" if self._server.is_running() else "has ended"
        tail = self._server.read_log_tail()
        log.warning(
            "%s\n%s %s and is restarted. The end of its log:\n%s", error, self._server.SOFTWARE.name, state, tail
        )
        self._server.stop()
        self.start()

    def close(self) -> None:
        if self._server.pid is not None:
            tail = self._server.read_log_tail()
            log.info("stopping %s. The end of its log:\n%s", self._server.SOFTWARE.name, tail)
        self._server.stop()  # first: closing the client would not wake threads that wait for an answer
        if self._open_client is not None:
            self._open_client.close()
        shutil.rmtree(self.spool, ignore_errors=True)


class ExternalHost(EngineHost[Server]):
    """An external server, which Draftworks did not start: after an error, requests to it can only be tried again."""

    def __init__(self, client: Server, spool: Path, layer_ids: tuple[int, ...]) -> None:
        self.client = client
        self.spool = spool
        self.layer_ids = layer_ids

    def require_running(self) -> None:
        self.client.require_reachable()

    def revive(self, error: EngineError) -> None:
        log.warning("%s. Trying again", error)

    def close(self) -> None:
        self.client.close()


def start_all(hosts: Sequence[ManagedHost]) -> None:
    """Start servers at the same time; if one does not start, or on an interrupt, all are closed.

    Raises:
        ConfigError, EngineError: see `ManagedHost.start`.
    """
    starting: list[Future[ManagedHost]] = []
    try:
        starting.extend(run_in_background(host.start) for host in hosts)
        for each in as_completed(starting):
            each.result()
    except BaseException:
        close_all(hosts, starting)
        raise


def close_all(hosts: Sequence[EngineHost], starting: Sequence[Future[Any]]) -> None:
    """Close all hosts while some are still starting; servers that come up meanwhile are closed too."""
    while True:
        for host in hosts:
            host.close()
        if not wait(starting, _CLOSE_AGAIN_S).not_done:
            break  # while a host is starting, the process that `close` has to stop may not exist yet
    for host in hosts:
        host.close()


PROBE_TOKENS = 64
PROBE_TEXT = "Zwölf naïve def f(x):\n\treturn x**2  # 3.14159 — 你好, 12345"


def probe_server(
    engine: TargetEngine, tokenize: Callable[[str], list[int]], target: TargetFiles, captures: bool
) -> None:
    """Check with test requests that the server uses the target's tokenizer and weights and keeps all hidden states.

    Raises:
        EngineError: its tokenizer gives other ids, it lost positions of a prompt that it had seen before, or its logits
            differ from those of the registry's head on its own hidden states.
    """
    where = f"{engine.display_name} cannot be used for target {target.name}"
    expected, found = _tokenize_probe(target), tokenize(PROBE_TEXT)
    if expected != found:
        raise EngineError(
            f"{where}: its tokenizer gives {found[:8]}… for {PROBE_TEXT[:12]!r}…, that of the registry "
            f"({target.tokenizer}) {expected[:8]}…"
        )
    if not captures:
        return
    sequence = [(7919 * (index + 1)) % target.vocab_size for index in range(min(PROBE_TOKENS, target.context))]
    try:
        engine.capture([sequence], [])
        repeated = engine.capture([sequence], [])[0]  # now a prefix could come from the cache
        check_head(engine, ["probe"], [sequence], [repeated["last"]])
    except CaptureError as error:
        raise EngineError(f"{where}: {error}") from error


def is_same_model(found: str, expected: str) -> bool:
    """Return whether a server's name of its model is the expected one, or another path of the same folder."""
    return found == expected or (Path(expected).is_dir() and Path(found).resolve() == Path(expected).resolve())


def _tokenize_probe(target: TargetFiles) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.tokenizer, revision=target.tokenizer_revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"target {target.name}: tokenizer {target.tokenizer} cannot be read: {error}") from error
    return tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
