"""Servers that Draftworks starts at the same time: all of them run afterwards, or none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S

from draftworks.capture.engine import EnginePlace
from draftworks.capture.engines.sglang_loading import start_replicas
from draftworks.errors import EngineError
from draftworks.sglang.server import ServerOptions


class SlowServer:
    """Stand-in for `SGLangServer`: the first serves at once; each other one waits until it is stopped, and never serves.

    Attributes:
        made: all instances.
        on_wait: called by each instance that does not serve yet.
    """

    made: list[SlowServer]
    url = "http://127.0.0.1:1"
    log = Path("sglang.log")
    version = "0.5.23"
    pid = None
    on_wait = staticmethod(lambda: None)

    def __init__(self, *arguments: object) -> None:
        self.first = not self.made
        self.serving = False
        self.stopped = threading.Event()
        self.made.append(self)

    def start(self) -> None:
        if self.first:
            self.serving = True
            return
        self.on_wait()
        assert self.stopped.wait(HANG_S)
        raise EngineError("it ended before it was ready")

    def stop(self) -> None:
        self.serving = False
        self.stopped.set()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> type[SlowServer]:
    monkeypatch.setattr("draftworks.capture.engines.sglang_hosts.SGLangServer", SlowServer)
    monkeypatch.setattr(SlowServer, "made", [], raising=False)
    return SlowServer


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(folder: Path, count: int) -> None:
    options = ServerOptions(
        model="m", revision=None, tokenizer="m", context=32, dtype="float32", device="cpu", layer_ids=(1,), spool=folder
    )
    start_replicas(options, count, 8, EnginePlace(folder))


def assert_none_is_left(servers: type[SlowServer]) -> None:
    assert [server.serving for server in servers.made] == [False] * 3
    assert all(server.stopped.is_set() for server in servers.made)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_no_start_and_leaves_no_server(servers, tmp_path: Path, monkeypatch):
    main = threading.main_thread().ident
    waiting = threading.Barrier(2, action=lambda: signal.pthread_kill(main, signal.SIGINT))
    monkeypatch.setattr(servers, "on_wait", staticmethod(waiting.wait))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, 3)
    assert_none_is_left(servers)


def test_if_one_does_not_start_nobody_waits_for_the_others(servers, tmp_path: Path, monkeypatch):
    first = iter([True])

    def fail_once() -> None:
        if next(first, False):
            raise EngineError("there is no GPU left")

    monkeypatch.setattr(servers, "on_wait", staticmethod(fail_once))
    with pytest.raises(EngineError, match="there is no GPU left"):
        start(tmp_path, 3)
    assert_none_is_left(servers)
