"""Two ranks of a job on two addresses, each with a real SGLang: one key, one result, whichever server computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from capture_toys import random_rows
from processes import kill_all, wait_until_ended
from sglang_toys import CPU, SGLANG, assert_key_is_kept, capture_spec
from waiting import wait_until

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.engines.sglang_job import JobHost
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.sglang.job_servers import JobServers, make_servers_folder
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(1800)]

TAPS = (LayerTap(2), LayerTap(4))
ROWS = [row.input_ids.tolist() for row in random_rows(4, seed=11, longest=60)]


@pytest.fixture(scope="module")
def ranks(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SGLangEngine]]:
    """The engines of two ranks, which have shared their servers."""
    out = tmp_path_factory.mktemp("sglang") / "job"
    out.mkdir()
    folder = make_servers_folder(out)

    def load(rank: int) -> SGLangEngine:
        servers = JobServers(folder, f"127.0.0.{rank + 1}", rank, 2)
        place = EnginePlace(out / f"engine-{rank}", TAPS, sglang=SGLANG, servers=servers)
        engine = load_engine(tiny_target, capture_spec(), CPU, place)
        assert isinstance(engine, SGLangEngine)
        engine.share_with_job()
        return engine

    with ThreadPoolExecutor(2) as pool:
        engines = list(pool.map(load, range(2)))
    yield engines
    close_all(engines)


def close_all(engines: Sequence[SGLangEngine]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(SGLangEngine.close, engines))


def host_of(engine: SGLangEngine) -> JobHost:
    assert isinstance(engine._host, JobHost)
    return engine._host


def wait_for_peer(engine: SGLangEngine, url: str) -> None:
    wait_until(lambda: [peer.client.url for peer in host_of(engine)._followed] == [url], f"the peer at {url}")


def capture_one_by_one(engine: SGLangEngine) -> list[dict[str, torch.Tensor]]:
    """Batches of one row each: the composition of a batch decides the last bits."""
    return [engine.capture([row], TAPS)[0] for row in ROWS]


def assert_same_bytes(one: Sequence[dict[str, torch.Tensor]], other: Sequence[dict[str, torch.Tensor]]) -> None:
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_request_without_the_key_is_answered_and_the_key_is_in_no_log_and_no_list_of_processes(ranks):
    for number, engine in enumerate(ranks, start=1):
        assert engine.url.startswith(f"http://127.0.0.{number}:")
        (own,) = host_of(engine)._own
        assert own.pid is not None
        assert_key_is_kept(engine.url, host_of(engine)._servers.read_key(), own.pid, own._server.log)


def test_a_rank_whose_server_died_goes_on_with_the_others_and_has_it_again(ranks, tiny_engine):
    first, second = ranks
    wait_for_peer(first, second.url)
    wait_for_peer(second, first.url)
    before = capture_one_by_one(first)
    assert_same_bytes(before, capture_one_by_one(second))
    sampling = ResponseSpec(max_new_tokens=5)
    answers = tiny_engine.generate(ROWS[:2], sampling, ["a", "b"], 200)
    (own,) = host_of(first)._own
    dead, address = psutil.Process(own.pid), first.url
    kill_all([*dead.children(recursive=True), dead])
    assert_same_bytes(before, capture_one_by_one(first))  # by the other rank's server, while its own starts
    assert first.generate(ROWS[:2], sampling, ["a", "b"], 200) == answers
    wait_until(lambda: own.client.url != address, "the server that is started again")
    wait_for_peer(second, own.client.url)
    assert_same_bytes(before, capture_one_by_one(first))
    assert own.is_running


def test_nothing_of_closed_ranks_is_left(ranks):
    servers = host_of(ranks[0])._servers
    assert {slot.rank for slot in servers.list_names()} == {0, 1}
    processes = [psutil.Process(host_of(engine)._own[0].pid) for engine in ranks]
    close_all(ranks)
    wait_until_ended(*processes)
    assert servers.list_names() == {}
    assert not any(host_of(engine).spool.exists() for engine in ranks)
