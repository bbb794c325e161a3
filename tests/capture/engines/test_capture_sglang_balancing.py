"""Several SGLang servers behind one engine share the work; if one dies, none of its work is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, VOCAB, FakeSGLang, RevivedHost, fake_sglang
from waiting import HANG_S

from draftworks.capture.answers.load_balancer import CircuitBreaker
from draftworks.capture.background import run_in_background
from draftworks.capture.engine import EnginePlace, load_engine, make_engine_identity
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.server_hosts import ExternalHost
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.engines.sglang_job import BalancedHost, balance
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.servers.client import GenerateRequest, Generation
from draftworks.sglang.client import SGLangClient
from draftworks.storage.identity import LayerTap

TARGET = TargetFiles(
    name="toy", model="models/toy", tokenizer="models/toy", digest="0" * 16, tokenizer_digest="1" * 16,
    num_layers=6, hidden_size=HIDDEN, vocab_size=VOCAB, context=32,
)  # fmt: skip
ROWS = [[7, 3, 9], [4], [5, 6, 7, 8], [9, 9], [1, 2, 3]]


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftworks.capture.engines.parts_engine._LONGEST_WAIT_S", 0.0)


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeSGLang]]:
    """Two servers with a spool each."""
    with ExitStack() as stack:
        yield [stack.enter_context(fake_sglang(tmp_path / f"spool{number}")) for number in range(2)]


def make_breaker() -> CircuitBreaker:
    return CircuitBreaker(failures=2, cooldown_s=float("inf"))


def make_balanced_engine(
    folder: Path, fakes: list[FakeSGLang], can_restart: bool = False, hosts=None, new_breaker=make_breaker
) -> SGLangEngine:
    identity = make_engine_identity(CaptureSpec(backend="sglang_server", compute_dtype="float32"))
    host = BalancedHost(hosts or [RevivedHost(fake) for fake in fakes], folder / "spool", 64, can_restart, new_breaker)
    return SGLangEngine(TARGET, identity, host, lambda: torch.eye(HIDDEN), attempts=3)


def assert_captured(engine: SGLangEngine) -> None:
    for row, streams in zip(ROWS, engine.capture(ROWS, [LayerTap(2)]), strict=True):
        ids = torch.tensor(row, dtype=torch.float32)[:, None].expand(-1, HIDDEN)
        assert torch.equal(streams["last"], ids)
        assert torch.equal(streams["hf2"], ids + 200)


def prompts_of(fake: FakeSGLang) -> list[list[int]]:
    return [prompt for body in fake.asked for prompt in body["input_ids"]]


def test_a_batch_is_shared_by_its_tokens_and_comes_back_in_its_order(fakes, tmp_path: Path):
    assert_captured(make_balanced_engine(tmp_path, fakes))
    shares = [prompts_of(fake) for fake in fakes]
    assert sorted(shares[0] + shares[1]) == sorted(ROWS)
    assert abs(sum(map(len, shares[0])) - sum(map(len, shares[1]))) <= max(map(len, ROWS))


def test_nothing_is_left_in_any_spool(fakes, tmp_path: Path):
    assert_captured(make_balanced_engine(tmp_path, fakes))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_share_of_a_server_that_fails_is_taken_by_the_other(fakes, tmp_path: Path):
    fakes[0].failures = [0, 500]
    engine = make_balanced_engine(tmp_path, fakes)
    for _ in range(3):
        assert_captured(engine)
    assert fakes[0].failures == []
    assert [host.revivals for host in engine._host._hosts] == [0, 0]


def test_answers_go_to_both(fakes, tmp_path: Path):
    engine = make_balanced_engine(tmp_path, fakes)
    for number in range(6):
        assert engine.generate([[1, number]], ResponseSpec(max_new_tokens=1), [f"{number}"], 20)[0].ids == (297,)
    assert [len(fake.asked) for fake in fakes] == [3, 3]
    assert engine.replicas == 2


def test_when_all_are_gone_the_error_names_each_of_them(fakes, tmp_path: Path):
    for fake in fakes:
        fake.failures = [500] * 20
    with pytest.raises(EngineError, match=r"(?s)none of 2 servers is available:") as raised:
        make_balanced_engine(tmp_path, fakes).capture(ROWS, [])
    assert all(fake.url in str(raised.value) for fake in fakes)


def test_after_all_have_failed_they_are_asked_again(fakes, tmp_path: Path):
    for fake in fakes:
        fake.failures = [500] * 2
    assert_captured(make_balanced_engine(tmp_path, fakes))


def test_a_refused_row_is_refused_once(fakes, tmp_path: Path):
    for fake in fakes:
        fake.refused = 5
    with pytest.raises(CaptureError, match="refused /generate"):
        make_balanced_engine(tmp_path, fakes).capture(ROWS, [])
    assert sum([5, 6, 7, 8] in prompts_of(fake) for fake in fakes) == 1


class RestartedHost(ExternalHost):
    """Host whose revival waits for the test, and fails unless `comes_back`; its start sets `revival_asked`."""

    comes_back = True

    def __init__(self, fake: FakeSGLang) -> None:
        super().__init__(SGLangClient(fake.url, HANG_S), fake.spool, (1, 3))
        self._fake = fake
        self.revivals = 0
        self.revival_asked = threading.Event()
        self.lets = threading.Event()

    def revive(self, error: EngineError) -> None:
        self.revivals += 1
        self.revival_asked.set()
        assert self.lets.wait(HANG_S)
        if not self.comes_back:
            raise EngineError(f"{self._fake.url} does not start")
        self._fake.failures = []


def test_a_server_of_ours_is_started_again_while_the_others_go_on(fakes, tmp_path: Path):
    fakes[0].failures = [0] * 99
    dead = RestartedHost(fakes[0])
    engine = make_balanced_engine(tmp_path, fakes, can_restart=True, hosts=[dead, RevivedHost(fakes[1])])
    for _ in range(3):
        assert_captured(engine)
    assert dead.revival_asked.wait(HANG_S)
    asked = len(fakes[0].asked)
    assert_captured(engine)
    assert len(fakes[0].asked) == asked  # it is being restarted
    dead.lets.set()
    wait_for_restarts(engine)
    assert_captured(engine)
    assert len(fakes[0].asked) > asked


def wait_for_restarts(engine: SGLangEngine) -> None:
    assert not wait(list(engine._host._restarting.values()), HANG_S).not_done


@pytest.fixture
def dead(fakes) -> list[RestartedHost]:
    """Two dead servers that Draftworks started; by default they come back at once."""
    hosts = [RestartedHost(fake) for fake in fakes]
    for fake, host in zip(fakes, hosts, strict=True):
        fake.failures = [0] * 99
        host.lets.set()
    return hosts


def test_a_server_that_is_being_started_again_gets_no_trial_and_is_not_started_twice(fakes, dead, tmp_path: Path):
    """Loading a real model takes longer than a breaker's cool-down."""
    now = [0.0]
    fakes[1].failures = []
    dead[0].lets.clear()
    engine = make_balanced_engine(
        tmp_path,
        fakes,
        can_restart=True,
        hosts=dead,
        new_breaker=lambda: CircuitBreaker(2, cooldown_s=30, clock=lambda: now[0]),
    )
    for _ in range(3):
        assert_captured(engine)
    assert dead[0].revival_asked.wait(HANG_S)
    asked = len(fakes[0].asked)
    for _ in range(3):
        now[0] += 31
        assert_captured(engine)
    assert len(fakes[0].asked) == asked
    dead[0].lets.set()
    wait_for_restarts(engine)
    assert_captured(engine)
    assert len(fakes[0].asked) > asked
    assert [host.revivals for host in dead] == [1, 0]


def test_when_all_of_ours_have_died_each_is_started_again(fakes, dead, tmp_path: Path):
    assert_captured(make_balanced_engine(tmp_path, fakes, can_restart=True, hosts=dead, new_breaker=CircuitBreaker))
    assert [host.revivals for host in dead] == [1, 1]


def test_when_the_last_of_ours_dies_the_one_that_is_being_started_is_waited_for(fakes, dead, tmp_path: Path):
    fakes[1].failures = []
    dead[0].lets.clear()
    engine = make_balanced_engine(tmp_path, fakes, can_restart=True, hosts=dead)
    for _ in range(3):
        assert_captured(engine)
    assert dead[0].revival_asked.wait(HANG_S)
    fakes[1].failures = [0] * 99
    dead[1].comes_back = False
    capturing = run_in_background(assert_captured, engine)
    assert dead[1].revival_asked.wait(HANG_S)
    dead[0].lets.set()
    capturing.result()
    assert dead[0].revivals == 1


def test_a_server_that_has_come_back_meanwhile_is_not_started_again(fakes, dead, tmp_path: Path):
    """Of two threads that fail together, one may request the revival after that of the other has finished."""
    engine = make_balanced_engine(tmp_path, fakes, can_restart=True, hosts=dead, new_breaker=CircuitBreaker)
    assert_captured(engine)
    engine._host.revive(EngineError("all were gone"))
    assert [host.revivals for host in dead] == [1, 1]


def test_when_none_of_ours_comes_back_the_error_says_why(fakes, dead, tmp_path: Path):
    for host in dead:
        host.comes_back = False
    with pytest.raises(EngineError, match=r"(?s)none of 2 servers could be restarted:") as raised:
        make_balanced_engine(tmp_path, fakes, can_restart=True, hosts=dead).capture(ROWS, [])
    assert all(f"{fake.url} does not start" in str(raised.value) for fake in fakes)


def test_no_request_that_is_on_its_way_keeps_the_program_from_ending(fakes, tmp_path: Path, monkeypatch):
    """Closing a client does not wake threads that read an answer, and the interpreter waits for non-daemon threads."""
    held = []
    generate = SGLangClient.generate

    def noted(client: SGLangClient, requests: Sequence[GenerateRequest]) -> list[Generation]:
        held.append(not threading.current_thread().daemon)
        return generate(client, requests)

    monkeypatch.setattr(SGLangClient, "generate", noted)
    assert_captured(make_balanced_engine(tmp_path, fakes))
    assert held == [False, False]


def test_closing_ends_all_and_what_is_on_its_way_fails(fakes, tmp_path: Path):
    engine = make_balanced_engine(tmp_path, fakes)
    engine.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        engine.capture(ROWS, [])


def test_servers_that_capture_other_layers_do_not_share_the_work(fakes, tmp_path: Path):
    hosts: list[EngineHost] = [RevivedHost(fake) for fake in fakes]
    hosts[1].layer_ids = (1, 4)
    with pytest.raises(EngineError, match=r"the same layers, found .*: \[1, 3\]; .*: \[1, 4\]"):
        make_balanced_engine(tmp_path, fakes, hosts=hosts)


@pytest.mark.parametrize(
    ("weights", "shares", "groups"),
    [([], 2, [[]]), ([5], 2, [[0]]), ([1, 1, 1, 1], 2, [[0, 2], [1, 3]]), ([1, 9, 4, 4], 2, [[1], [2, 3, 0]])],
)
def test_shares_are_of_about_the_same_weight(weights, shares, groups):
    assert balance(weights, shares) == groups


@pytest.fixture
def place(tmp_path: Path) -> EnginePlace:
    return EnginePlace(tmp_path / "engine", (LayerTap(2), LayerTap(4)), lambda: torch.eye(HIDDEN), sglang=SGLangSpec())


def test_each_of_your_servers_is_examined_before_any_is_asked(fakes, place):
    fakes[1].info = {**fakes[1].info, "dtype": "float16"}
    server = {"urls": [fake.url for fake in fakes], "spool": str(fakes[0].spool)}
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
    with pytest.raises(EngineError, match=rf"(?s){fakes[1].url} cannot be used.*computes in float16"):
        load_engine(TARGET, capture, torch.device("cpu"), place)
    assert not any(fake.asked for fake in fakes)


def test_if_one_of_our_servers_does_not_start_none_is_left(place):
    server = {"replicas": 2}
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
    missing = EnginePlace(place.folder, place.taps, place.head, sglang=SGLangSpec(python="/nowhere/python"))
    with pytest.raises(ConfigError, match=r"/nowhere/python .*cannot be run"):
        load_engine(TARGET, capture, torch.device("cpu"), missing)
