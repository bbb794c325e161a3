"""The servers of several ranks share the work of each; a rank whose servers are gone uses those of the others.
Servers that Draftworks starts at the same time: all of them run afterwards, or none.
An unsuitable external server is rejected before a capture, with every reason and its correction.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, VOCAB, FakeSGLang, fake_sglang, server_info
from waiting import HANG_S, wait_until

from draftworks.capture.engine import EnginePlace, load_engine, make_engine_identity
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.engines.sglang_hosts import ExternalHost, require_server
from draftworks.capture.engines.sglang_job import JobHost
from draftworks.capture.engines.sglang_loading import start_replicas
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError, EngineError
from draftworks.sglang.client import SGLangClient
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
        host = JobHost(servers, [own], own.spool, 64, HANG_S, spread=spread, look_s=LOOK_S)  # type: ignore[arg-type]
        self._stack.callback(host.close)
        if shared:
            host.share_with_job()
        return host


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("draftworks.capture.engines.sglang_engine._LONGEST_WAIT_S", 0.0)
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


def check_server(
    spool: Path, served_spool: Path | None = None, model: str | None = None, args: tuple[str, ...] = (), **served
) -> None:
    """Check a server that differs by `served` from what the registry asks for."""
    with fake_sglang(spool) as fake, SGLangClient(fake.url, 5) as client:
        fake.info = server_info("models/toy", served_spool or spool, **served)
        server = {"url": fake.url, "spool": str(spool), "model": model, "args": list(args)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        require_server(client, TARGET, capture, (1, 3), longest=32)


def test_a_server_set_up_for_capture_is_accepted(tmp_path: Path):
    check_server(tmp_path)
    check_server(tmp_path, return_aux_hidden_state_layer_ids=[0, 1, 3, 4])
    check_server(tmp_path, model_path="/mnt/toy", model="/mnt/toy")
    check_server(tmp_path, quantization="fp8", args=("--quantization", "fp8"))


def test_another_version_is_warned_of(tmp_path: Path, caplog):
    check_server(tmp_path, version="0.5.24")
    assert "is SGLang 0.5.24; Draftworks was tested with 0.5.23" in caplog.text


def test_weights_that_were_replaced_since_it_was_started_are_noticed(tmp_path: Path):
    with fake_sglang(tmp_path) as fake, SGLangClient(fake.url, 5) as client:
        fake.served = {"model_path": "models/tuned"}
        server = {"url": fake.url, "spool": str(tmp_path)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        with pytest.raises(
            EngineError, match=r"the model models/tuned \(it was started with models/toy\), expected models/toy"
        ):
            require_server(client, TARGET, capture, (1, 3))


@pytest.mark.parametrize(
    ("architecture", "convention", "ids", "taken"),
    [
        ("LlamaForCausalLM", "eagle3", [1, 3], True),
        ("DeepseekV3ForCausalLM", "eagle3", [1, 3], True),
        ("DeepseekV3ForCausalLM", "eagle3", [0, 1, 3], False),
        ("DeepseekV3ForCausalLM", "eagle3", [2, 4], True),
        ("DeepseekV3ForCausalLM", "dflash", [0, 1, 3], True),
        ("GlmMoeDsaForCausalLM", None, [2, 4], True),
        ("KimiK25ForConditionalGeneration", "eagle3", [0, 3], False),
    ],
)
def test_ids_of_layers_are_understood_as_the_server_understands_them(
    tmp_path: Path, architecture: str, convention: str | None, ids: list[int], taken: bool
):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    target = TARGET.model_copy(update={"model": str(tmp_path)})
    served = {"return_aux_hidden_state_layer_ids": ids, "aux_hidden_state_capture": convention}
    with fake_sglang(tmp_path / "spool", **served) as fake, SGLangClient(fake.url, 5) as client:
        fake.info["model_path"] = str(tmp_path)
        server = {"url": fake.url, "spool": str(fake.spool)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        if taken:
            assert set(require_server(client, target, capture, (1, 3)).layer_ids or ()) >= {1, 3}
        else:
            with pytest.raises(EngineError, match=r"captures the layers .* expected \[1, 3\].*algorithm DFLASH"):
                require_server(client, target, capture, (1, 3))


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ({"model_path": "models/other"}, "it serves the model models/other, expected models/toy.*capture.server.model"),
        ({"revision": "abc"}, "it serves revision abc, expected None"),
        ({"dtype": "float16"}, "it computes in float16, expected float32: --dtype float32"),
        ({"disable_radix_cache": False}, "prefix cache is on.*--disable-radix-cache"),
        ({"chunked_prefill_size": 4096}, "--chunked-prefill-size -1"),
        ({"return_aux_hidden_state_layer_ids": [1]}, r"captures the layers \[1\], expected \[1, 3\].*-layer-ids 1 3"),
        ({"enable_return_aux_hidden_states": False}, r"captures the layers \[\], expected \[1, 3\]"),
        ({"context_length": 32}, "its context is 32 tokens, expected more than 32: --context-length 48"),
        ({"quantization": "fp8"}, r"runs with --quantization fp8.*capture.server.args: \[--quantization, fp8\]"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "runs with --kv-cache-dtype fp8_e5m2"),
        ({"torchao_config": "int4wo-128"}, "runs with --torchao-config int4wo-128"),
        ({"lora_paths": ["/adapter"]}, "runs with --lora-paths"),
        ({"json_model_override_args": '{"rope_theta": 1}'}, "runs with --json-model-override-args"),
        ({"attn_dp_size": 2}, "2 groups of attention data parallelism.*without --attn-dp-size"),
        ({"enable_dp_attention": True, "dp_size": 4}, "4 groups of attention data parallelism"),
        ({"forward_hooks": None}, r"nowhere \(it is not loaded\).*--forward-hooks"),
    ],
    ids=str,
)
def test_every_difference_is_told_with_what_puts_it_right(tmp_path: Path, served, message):
    with pytest.raises(EngineError, match=message):
        check_server(tmp_path, **served)


def test_all_differences_are_told_at_once(tmp_path: Path):
    with pytest.raises(EngineError) as raised:
        check_server(tmp_path, tmp_path / "elsewhere", dtype="bfloat16", disable_radix_cache=False)
    assert len(str(raised.value).splitlines()) == 4
    assert str(tmp_path / "elsewhere") in str(raised.value)


def test_an_unreachable_url_is_told(tmp_path: Path):
    server = {"url": "http://127.0.0.1:9", "spool": str(tmp_path)}
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
    with pytest.raises(EngineError, match="http://127.0.0.1:9 cannot be reached"):
        load_engine(TARGET, capture, torch.device("cpu"), EnginePlace(tmp_path, ()))


def test_a_missing_environment_is_told_before_anything_is_started(tmp_path: Path):
    place = EnginePlace(tmp_path / "engine", (LayerTap(2),), sglang=SGLangSpec(python=str(tmp_path / "python")))
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32")
    with pytest.raises(ConfigError, match=r"python .*cannot be run.*make sglang-env"):
        load_engine(TARGET, capture, torch.device("cpu"), place)


def test_a_url_without_the_folder_of_its_hidden_states_is_refused():
    with pytest.raises(ConfigError, match="target.yaml: server: url and spool must be given together"):
        parse_spec(CaptureSpec, {"server": {"url": "http://127.0.0.1:9"}}, where="target.yaml")
