"""Mooncake's store when there is no room, when processes die, and when Mooncake's lease is in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from mooncake_harness import is_object
from mooncake_toys import running_mooncake
from waiting import HANG_S, wait_until

from draftworks.errors import StoreError, StoreFullError, StoreLostError
from draftworks.features.contracts import SampleRef
from draftworks.features.mooncake_objects import HEAD_BYTES, MooncakeObjects
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.features.sample_folder import sample_key
from draftworks.mooncake.address import Code
from draftworks.mooncake.client import MooncakeClient
from draftworks.mooncake.service import MooncakeService

pytestmark = pytest.mark.mooncake
MIB = 1 << 20
Opened = Callable[..., MooncakeFeatureStore]
OTHER = """
import sys, time
from pathlib import Path
import torch
from mooncake_toys import *
from draftworks.features.contracts import SampleRef
from draftworks.features.mooncake_store import MooncakeFeatureStore
store = MooncakeFeatureStore(Path(sys.argv[1]), 60.0)
"""
PRODUCE = """
for count in range(10**6):
    ref = SampleRef(f"p{count}", "run", "task", "", {"last": f"{count:032x}"}, {}, num_tokens=4)
    print(store.put(ref, {"last": torch.full((1 << 20,), float(count))}).to_json(), file=sys.stderr, flush=True)
    if count == 2:
        time.sleep(600)
"""
CONSUME = """
ref = SampleRef.from_json(sys.argv[2])
tensors, handle = store.get(ref)
print(float(tensors["last"][0]), file=sys.stderr, flush=True)
time.sleep(600)
"""


STOP_AT_WORK = """
import os, signal, threading
client = store._objects.client
ref = SampleRef("b5", "run", "task", "", {"last": f"{5:032x}"}, {}, num_tokens=4)
def stop():
    while client._library_store.get_size(sys.argv[2]) != -703:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
threading.Thread(target=stop, daemon=True).start()
store.put(ref, {"last": torch.full((32 << 20,), 5.0)})
print("put", file=sys.stderr, flush=True)
time.sleep(600)
"""


def big_ref(index: int) -> SampleRef:
    return SampleRef(f"b{index}", "run", "task", "", {"last": f"{index:032x}"}, {}, num_tokens=4)


def big(index: int, mib: int = 8) -> dict[str, torch.Tensor]:
    return {"last": torch.full((mib * MIB // 4,), float(index))}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeService]:
    with running_mooncake(tmp_path_factory.mktemp("mooncake")) as service:
        yield service


@pytest.fixture
def client(shared: MooncakeService) -> Iterator[MooncakeClient]:
    client = MooncakeClient(shared.address)
    close, client.close = client.close, lambda: None  # for the stores that use it
    yield client
    client.remove([key for key in client.list_keys(client.read_owner().metrics) if is_object(key)], force=True)
    close()


@pytest.fixture
def opened(shared: MooncakeService, client: MooncakeClient) -> Opened:
    """Opens the store again, as another process would."""
    return partial(MooncakeFeatureStore, shared.address_file, 0.0, connect=lambda _: client)


def object_key(ref: SampleRef) -> str:
    return f"toys/k{sample_key(ref.feature_keys['last'])}"


def fill(store: MooncakeFeatureStore) -> list[SampleRef]:
    refs: list[SampleRef] = []

    def put_on() -> None:
        while True:
            refs.append(store.put(big_ref(len(refs)), big(len(refs))))

    with pytest.raises(StoreFullError, match=r"sample b\d+: .* has no room for 8389632 bytes"):
        put_on()
    return refs


def start_other(service: MooncakeService, program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OTHER + program, str(service.address_file), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def answers(process: subprocess.Popen[str], begins: str, count: int) -> list[str]:
    """Return lines of a process that are its own: Mooncake writes there too."""
    assert process.stderr is not None
    found: list[str] = []
    for line in process.stderr:
        found += [line] if line.startswith(begins) else []
        if len(found) == count:
            return found
    raise AssertionError(f"the other process ended after {found}")


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


class TestNoRoom:
    def test_a_full_store_refuses_and_loses_nothing(self, opened: Opened):
        store = opened(put_timeout_s=0.0)
        refs = fill(store)
        assert len(refs) >= 6
        for index, ref in enumerate(refs):
            assert torch.equal(store.get(ref)[0]["last"], big(index)["last"])

    def test_put_waits_until_another_frees(self, opened: Opened):
        refs = fill(opened(put_timeout_s=0.0))
        producer, consumer = opened(put_timeout_s=HANG_S), opened()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(producer.put, big_ref(100), big(100))
            time.sleep(0.3)
            assert not waiting.done()
            consumer.get(refs[0])
            consumer.free(refs[0].feature_keys.values())
            ref = waiting.result()
        assert torch.equal(consumer.get(ref)[0]["last"], big(100)["last"])

    def test_what_is_larger_than_the_store_is_refused_at_once(self, opened: Opened):
        with pytest.raises(StoreFullError, match=f"has no room for {(64 << 20) + HEAD_BYTES} bytes"):
            opened(put_timeout_s=HANG_S).put(big_ref(1), big(1, mib=64))


class TestContent:
    def test_freed_keys_are_missing_for_all_at_once_though_mooncake_keeps_what_was_read(self, opened: Opened):
        store, other = opened(), opened()
        ref = store.put(big_ref(1), big(1))
        key = ref.feature_keys["last"]
        store.get(ref)
        assert store.free([key]) == (8 << 20) + HEAD_BYTES
        for reader in (store, other):
            assert reader.find_missing([key]) == [key]
            with pytest.raises(StoreError, match=f"b1, feature last: key {key} is not in the feature store"):
                reader.get(ref)
        other.put(ref, big(2))
        for reader in (store, other):
            assert reader.find_missing([key]) == []
            assert torch.equal(reader.get(ref)[0]["last"], big(2)["last"])

    @pytest.mark.parametrize("length", [HEAD_BYTES, MIB, 8 * MIB + HEAD_BYTES - 1, 8 * MIB + HEAD_BYTES + 1])
    def test_any_length_but_the_exact_one_is_an_error(self, client: MooncakeClient, opened: Opened, length: int):
        store = opened()
        ref = store.put(big_ref(1), big(1))
        client.put_small({object_key(ref): b"x" * length})
        with pytest.raises(StoreError, match=f"sample b1: {object_key(ref)} is damaged: "):
            store.get(ref)
        assert store.health()["leases"] == 0

    def test_of_equal_keys_put_at_the_same_time_one_is_kept(self, opened: Opened):
        stores = [opened() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            refs = list(pool.map(lambda n: stores[n].put(big_ref(1), big(n)), range(4)))
        assert stores[0].health()["features"] == 1
        values = {float(store.get(ref)[0]["last"][0]) for store, ref in zip(stores, refs, strict=True)}
        assert len(values) == 1

    def test_views_of_one_memory_travel_together(self, opened: Opened):
        table = torch.arange(4000.0).reshape(100, 40)
        tensors = {"whole": table, "top": table[:50], "again": table, "odd": table[3:5, 7:9]}
        ref = opened().put(SampleRef("v", "", "", "", {name: name for name in tensors}, {}), tensors)
        found = opened().get(ref)[0]
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())

    def test_several_tensors_of_an_object_are_read_as_they_were_put(self, client: MooncakeClient):
        objects = MooncakeObjects(client, 0.0)
        tensors = {"a": torch.arange(7), "b": torch.randn(3, 5).to(torch.bfloat16), "c": torch.tensor(True)}
        objects.put("parts", {"one": tensors, "two": {"a": torch.zeros(0)}})
        found = objects.read("parts", {"one": None, "none": None, "two": None})
        assert found.keys() == {"one", "two"}
        assert all(torch.equal(found["one"][name], tensor) for name, tensor in tensors.items())
        with pytest.raises(StoreError, match="parts: 99 features at once are more than the store can describe"):
            objects.put("parts", {"many": {str(number): torch.zeros(1) for number in range(99)}})


class TestDeaths:
    def test_what_a_killed_producer_published_is_read(self, shared: MooncakeService, opened: Opened):
        producer = start_other(shared, PRODUCE)
        refs = [SampleRef.from_json(line) for line in answers(producer, "{", 3)]
        kill(producer)
        for index, ref in enumerate(refs):
            assert torch.equal(opened().get(ref)[0]["last"], torch.full((1 << 20,), float(index)))

    def test_the_next_consumer_goes_on_after_a_kill(self, shared: MooncakeService, opened: Opened):
        ref = opened().put(big_ref(7), big(7))
        consumer = start_other(shared, CONSUME, ref.to_json())
        assert answers(consumer, "7", 1) == ["7.0\n"]
        kill(consumer)
        assert torch.equal(opened().get(ref)[0]["last"], big(7)["last"])


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT], ids=["killed", "slow"])
def test_what_another_writer_began_is_missing_and_taken_over(tmp_path: Path, end: int):
    with running_mooncake(tmp_path, segment_bytes=256 * MIB) as service:
        store = MooncakeFeatureStore(service.address_file, HANG_S)
        client, key = MooncakeClient(service.address), big_ref(5).feature_keys["last"]
        writer = start_other(service, STOP_AT_WORK, object_key(big_ref(5)))
        wait_until(lambda: psutil.Process(writer.pid).status() == psutil.STATUS_STOPPED, "that it is under way")
        assert client.sizes([object_key(big_ref(5))]) == [Code.UNFINISHED]
        assert store.find_missing([key]) == [key]
        assert store.free([key]) == 0
        ref = store.put(big_ref(5), big(6))
        os.kill(writer.pid, end)
        if end == signal.SIGCONT:
            assert answers(writer, "put", 1)
        kill(writer)
        assert torch.equal(store.get(ref)[0]["last"], big(6)["last"])


@pytest.mark.parametrize("victim", ["owner", "master"])
def test_a_lost_store_is_told_by_every_call_and_used_again_when_it_runs(tmp_path: Path, victim: str):
    with running_mooncake(tmp_path) as service:
        store = MooncakeFeatureStore(service.address_file, 0.0)
        ref = store.put(big_ref(1), big(1))
        keys = list(ref.feature_keys.values())
        os.kill(service.pid(victim), signal.SIGKILL)
        calls: list[Callable[[], object]] = [
            lambda: store.get(ref),
            lambda: store.put(big_ref(3), big(3)),
            lambda: store.find_missing(keys),
            store.health,
        ]
        for call in calls:
            with pytest.raises(StoreLostError, match=r"toys .* is lost|does not run, and was not started"):
                call()
        service.restart()
        patient = MooncakeFeatureStore(service.address_file, HANG_S)
        assert store.find_missing(keys) == patient.find_missing(keys) == keys
        with pytest.raises(StoreError, match="is not in the feature store"):
            store.get(ref)
        assert torch.equal(store.get(store.put(big_ref(1), big(1)))[0]["last"], big(1)["last"])
        assert store.health()["losses"] == 1


def test_a_put_that_waits_notices_that_the_store_is_lost(tmp_path: Path):
    with running_mooncake(tmp_path) as service:
        fill(MooncakeFeatureStore(service.address_file, 0.0, put_timeout_s=0.0))
        waiting_store = MooncakeFeatureStore(service.address_file, 0.0, put_timeout_s=HANG_S)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(waiting_store.put, big_ref(99), big(99))
            time.sleep(0.3)
            assert not waiting.done()
            os.kill(service.pid("owner"), signal.SIGKILL)
            with pytest.raises(
                StoreLostError, match="the process that owns its memory is dead|does not run, and was not started"
            ):
                waiting.result(HANG_S)
