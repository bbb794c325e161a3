"""The servers of several ranks share the work of each; a rank whose servers are gone uses those of the others.
Servers that Draftworks starts at the same time: all of them run afterwards, or none.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, VOCAB, FakeSGLang, fake_sglang
from waiting import HANG_S, wait_until

from draftworks.capture.engine import EnginePlace, make_engine_identity
from draftworks.capture.engines.server_hosts import ExternalHost
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.engines.sglang_job import JobHost
from draftworks.capture.engines.sglang_loading import start_replicas
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import EngineError
from draftworks.sglang.client import SGLangClient
from draftworks.sglang.environment import SGLANG
from draftworks.sglang.job_servers import JobServers, ServerSlot, make_servers_folder
from draftworks.sglang.server import ServerOptions
from draftworks.storage.identity import LayerTap

TARGET = TargetFiles(
    name="toy", model="models/toy", tokenizer="models/toy", digest="0" * 16, tokenizer_digest="1" * 16,
    num_layers=6, hidden_size=HIDDEN, vocab_size=VOCAB, context=32,
)  # fmt: skip
ROWS = [[7, 3, 9], [4], [5, 6, 7, 8]]
LOOK_S = 0.01


class OwnHost(ExternalHost):
    """Stand-in for `ManagedHost`: a started server that a test ends; a revival goes on at another address.

    Attributes:
        is_running: set to False by a test that kills it.
        broken: whether a revival fails.
    """

    version = "0.5.23"

    def __init__(self, fakes: list[FakeSGLang], key: str) -> None:
        self._fakes = iter(fakes)
        self._key = key
        self.is_running = True
        self.broken = False
        self.revivals = 0
        super().__init__(SGLangClient("http://127.0.0.1:1", HANG_S, key), fakes[0].spool, (1, 3))
        self._go_on()

    def revive(self, error: EngineError) -> None:
        self.revivals += 1
        if self.broken:
            raise EngineError("there is no GPU left")
        self._go_on()
        self.is_running = True

    def _go_on(self) -> None:
        self.fake = next(self._fakes)
        self.fake.key = self._key
        self.client, self.spool = SGLangClient(self.fake.url, HANG_S, self._key), self.fake.spool


class Job:
    """The hosts of some ranks of one job."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = make_servers_folder(folder)
        self._spools = folder / "spools"
        self._stack = stack

    def add_rank(self, rank: int, world_size: int, spread: bool = False, shared: bool = True) -> JobHost:
        servers = JobServers(self._folder, "127.0.0.1", rank, world_size)
        spools = [self._spools / f"{rank}-{start}" for start in range(2)]
        own = OwnHost([self._stack.enter_context(fake_sglang(spool)) for spool in spools], servers.read_key())
        host = JobHost(
            servers,
            [own],
            own.spool,
            64,
            lambda url: SGLangClient(url, HANG_S, servers.read_key()),
            spread=spread,
            look_s=LOOK_S,
        )  # type: ignore[arg-type]
        self._stack.callback(host.close)
        if shared:
            host.share_with_job()
        return host


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("draftworks.capture.engines.parts_engine._LONGEST_WAIT_S", 0.0)
    with ExitStack() as stack:
        yield Job(tmp_path, stack)


def make_engine(host: JobHost) -> SGLangEngine:
    identity = make_engine_identity(CaptureSpec(backend="sglang_server", compute_dtype="float32"))
    return SGLangEngine(TARGET, identity, host, lambda: torch.eye(HIDDEN), attempts=3)


def assert_captured(engine: SGLangEngine) -> None:
    for row, streams in zip(ROWS, engine.capture(ROWS, [LayerTap(2)]), strict=True):
        ids = torch.tensor(row, dtype=torch.float32)[:, None].expand(-1, HIDDEN)
        assert torch.equal(streams["last"], ids)
        assert torch.equal(streams["hf2"], ids + 200)


def answer(engine: SGLangEngine, count: int) -> None:
    for number in range(count):
        assert engine.generate([[1, number]], ResponseSpec(max_new_tokens=1), [f"{number}"], 20)[0].ids == (297,)


def own_of(host: JobHost) -> OwnHost:
    (own,) = host._own
    assert isinstance(own, OwnHost)
    return own


def find_peer_urls(host: JobHost) -> list[str]:
    """Addresses of the other ranks' servers that get requests."""
    return [peer.client.url for peer in host._followed if peer.name is not None]


def wait_for_peers(*hosts: JobHost) -> None:
    urls = {own_of(host).fake.url for host in hosts}
    for host in hosts:
        others = urls - {own_of(host).fake.url}
        wait_until(lambda host=host, others=others: set(find_peer_urls(host)) == others)


def test_answers_are_asked_of_all_ranks_alike(job):
    hosts = [job.add_rank(rank, 3, spread=True) for rank in range(3)]
    wait_for_peers(*hosts)
    engine = make_engine(hosts[0])
    assert engine.replicas == 3
    answer(engine, 6)
    assert [len(own_of(host).fake.asked) for host in hosts] == [2, 2, 2]


def test_hidden_states_come_from_a_ranks_own_server_while_it_serves(job):
    hosts = [job.add_rank(rank, 2) for rank in range(2)]
    wait_for_peers(*hosts)
    engine = make_engine(hosts[0])
    assert (engine.replicas, engine.list_members()) == (1, (engine,))
    for _ in range(3):
        assert_captured(engine)
    assert own_of(hosts[1]).fake.asked == []


def test_before_an_engine_is_shared_nobody_else_uses_it_and_it_uses_nobody(job):
    alone = job.add_rank(0, 2, shared=False)
    other = job.add_rank(1, 2)
    assert find_peer_urls(alone) == []
    own_of(alone).fake.failures = [500] * 2
    assert_captured(make_engine(alone))
    assert own_of(other).fake.asked == []
    assert [slot.rank for slot in other._servers.list_names()] == [1]


def test_a_request_that_fails_is_answered_by_another_rank(job, tmp_path: Path):
    hosts = [job.add_rank(rank, 2) for rank in range(2)]
    wait_for_peers(*hosts)
    own_of(hosts[0]).fake.failures = [500]
    assert_captured(make_engine(hosts[0]))
    assert len(own_of(hosts[1]).fake.asked) == 1
    assert not [path for path in (tmp_path / "spools").rglob("*") if path.is_file()]


def test_a_server_that_ended_is_started_again_unasked_and_found_at_its_new_address(job):
    hosts = [job.add_rank(rank, 2, spread=True) for rank in range(2)]
    wait_for_peers(*hosts)
    own = own_of(hosts[1])
    before, own.is_running = own.fake.url, False
    wait_until(lambda: find_peer_urls(hosts[0]) not in ([before], []))
    assert (own.revivals, find_peer_urls(hosts[0])) == (1, [own.fake.url])
    answer(make_engine(hosts[0]), 4)
    assert [len(own_of(host).fake.asked) for host in hosts] == [2, 2]


def test_while_no_server_of_its_own_can_be_started_a_rank_works_with_the_others(job):
    hosts = [job.add_rank(rank, 2) for rank in range(2)]
    wait_for_peers(*hosts)
    own = own_of(hosts[0])
    own.broken, own.is_running = True, False
    own.fake.failures = [0] * 20
    engine = make_engine(hosts[0])
    for _ in range(4):
        assert_captured(engine)
    wait_until(lambda: own.revivals > 0)
    assert [slot.rank for slot in hosts[1]._servers.list_names()] == [1]
    assert find_peer_urls(hosts[1]) == []


def test_a_rank_that_is_alone_and_cannot_start_its_server_fails_with_the_reason(job):
    host = job.add_rank(0, 2)
    own = own_of(host)
    own.broken = True
    own.fake.failures = [500] * 20
    with pytest.raises(EngineError, match=r"(?s)none of 1 servers could be restarted:.*there is no GPU left"):
        make_engine(host).capture(ROWS, [])


def test_a_rank_that_ends_is_not_asked_any_more(job):
    hosts = [job.add_rank(rank, 2, spread=True) for rank in range(2)]
    wait_for_peers(*hosts)
    hosts[1].close()
    wait_until(lambda: find_peer_urls(hosts[0]) == [])
    answer(make_engine(hosts[0]), 3)
    assert own_of(hosts[1]).fake.asked == []
    assert list(hosts[0]._servers.list_names()) == [ServerSlot(0, 0)]


def test_a_server_with_another_key_is_passed_over(job):
    hosts = [job.add_rank(rank, 2, spread=True) for rank in range(2)]
    wait_for_peers(*hosts)
    own_of(hosts[1]).fake.key = "another"
    answer(make_engine(hosts[0]), 4)
    assert own_of(hosts[1]).fake.asked == []
    with pytest.raises(EngineError, match=r"refused our key, or wants one \(/generate, 401\)"):
        SGLangClient(own_of(hosts[1]).fake.url, HANG_S).generate([])


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
    SOFTWARE = SGLANG
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
