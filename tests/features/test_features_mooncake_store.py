"""Mooncake's stores when there is no room, when processes die, and when Mooncake's lease is in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from features_toys import toy_ref, toy_tensors
from mooncake_toys import LEASE_TTL_S, running_mooncake, within_a_lease
from waiting import HANG_S, wait_until

from draftworks.errors import StoreError, StoreFullError, StoreLostError
from draftworks.features.contracts import SampleRef
from draftworks.features.keyed_mooncake import KeyedMooncakeStore
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.mooncake.client import MooncakeClient
from draftworks.mooncake.service import MooncakeService

pytestmark = pytest.mark.mooncake
MIB = 1 << 20
OTHER = """
import sys, time
import torch
from mooncake_toys import *
from draftworks.features.contracts import SampleRef
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.mooncake.address import MooncakeAddress
store = MooncakeFeatureStore(MooncakeAddress(sys.argv[1], "toys"))
"""
PRODUCE = """
for count in range(10**6):
    ref = SampleRef(f"p{count}", "run", "task", "", {"last": ""}, {}, num_tokens=4)
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
    yield client
    keys = [key for key in client.list_keys(client.read_owner().metrics) if "/g" in key or key.endswith("/head")]
    client.remove(keys, force=True)
    client.close()


def fill(store: MooncakeFeatureStore) -> list[SampleRef]:
    refs: list[SampleRef] = []

    def put_on() -> None:
        while True:
            refs.append(store.put(big_ref(len(refs)), big(len(refs))))

    with pytest.raises(StoreFullError, match=r"sample b\d+: .* has no room for 8388608 bytes"):
        put_on()
    return refs


def start_other(client: MooncakeClient, program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OTHER + program, client.address.master, *arguments]
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
    def test_a_full_store_refuses_and_loses_nothing(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, put_timeout_s=0.0, client=client)
        refs = fill(store)
        assert len(refs) >= 6
        for index, ref in enumerate(refs):
            assert torch.equal(store.get(ref)[0]["last"], big(index)["last"])

    def test_put_waits_for_a_consumer_whose_leases_run_out_meanwhile(self, client: MooncakeClient):
        refs = fill(MooncakeFeatureStore(client.address, put_timeout_s=0.0, client=client))
        producer = MooncakeFeatureStore(client.address, put_timeout_s=HANG_S, client=client)
        consumer = MooncakeFeatureStore(client.address, client=client)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(producer.put, big_ref(100), big(100))
            time.sleep(0.3)
            assert not waiting.done()
            consumer.release(consumer.get(refs[0])[1])
            ref = waiting.result()
        assert torch.equal(consumer.get(ref)[0]["last"], big(100)["last"])

    def test_what_is_larger_than_the_store_is_refused_at_once(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, put_timeout_s=HANG_S, client=client)
        with pytest.raises(StoreFullError, match="has no room for 67108864 bytes"):
            store.put(big_ref(1), big(1, mib=64))

    def test_abort_ends_a_put_that_waits_or_travels(self, client: MooncakeClient, monkeypatch: pytest.MonkeyPatch):
        store = MooncakeFeatureStore(client.address, client=client)
        put = client.put

        def put_and_abort(*words: list) -> list[int]:
            codes = put(*words)
            store.abort("b1")
            return codes

        monkeypatch.setattr(client, "put", put_and_abort)
        with pytest.raises(StoreError, match="b1 was aborted while it was being put"):
            store.put(big_ref(1), big(1))
        monkeypatch.undo()
        assert store.health()["tensors"] == store.health()["entries"] == 0


class TestMooncakesLease:
    """Mooncake refuses to remove what was read lately."""

    def test_a_released_sample_is_gone_at_once_and_its_memory_later(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, client=client)
        refs: list[SampleRef] = []

        def put_and_release() -> dict[str, Any]:
            refs.append(store.put(big_ref(1), big(1)))
            store.release(store.get(refs[-1])[1])
            return store.health()

        health, ref = within_a_lease(put_and_release), refs[-1]
        with pytest.raises(StoreError, match=r"b1: generation \d+ .* is gone"):
            MooncakeFeatureStore(client.address, client=client).get(ref)
        assert health | {"tensors": 1, "entries": 0, "deferred_bytes": 8 * MIB} == health
        wait_until(lambda: not store.health()["tensors"], "the end of the leases")
        assert store.health()["deferred"] == 0

    def test_a_sole_readers_memory_is_free_at_once(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, sole_reader=True, client=client)
        ref = store.put(big_ref(1), big(1))
        store.release(store.get(ref)[1])
        assert store.health() | {"tensors": 0, "entries": 0, "deferred": 0} == store.health()

    def test_freed_keys_are_missing_for_all_and_another_generation_when_put_again(self, client: MooncakeClient):
        store, other = (KeyedMooncakeStore(client.address, client=client) for _ in range(2))
        ref = store.put(big_ref(1), big(1))
        key = ref.feature_keys["last"]

        def put_and_free() -> int:
            store.release(store.get(store.put(ref, big(1)))[1])
            return store.free([key])

        assert within_a_lease(put_and_free) == 0
        for reader in (store, other):
            assert reader.find_missing([key]) == [key]
            with pytest.raises(StoreError, match=f"b1, feature last: key {key} is not in the feature store"):
                reader.get(ref)
        other.put(ref, big(2))
        time.sleep(3 * LEASE_TTL_S)
        store.gc()
        for reader in (store, other):
            assert reader.find_missing([key]) == []
            assert torch.equal(reader.get(ref)[0]["last"], big(2)["last"])

    def test_gc_of_any_process_finds_what_a_killed_one_left(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, client=client)
        kept, freed = (store.put(big_ref(index), big(index)) for index in (1, 2))
        client.remove([key.rsplit("/", 2)[0] + "/head" for key in freed.feature_keys.values()], force=True)
        assert store.gc() == 0
        assert MooncakeFeatureStore(client.address, orphan_age_s=0.0, client=client).gc() == 8 * MIB
        assert torch.equal(store.get(kept)[0]["last"], big(1)["last"])


class TestContent:
    @pytest.mark.parametrize("length", [MIB, 8 * MIB - 1, 8 * MIB + 1])
    def test_any_length_but_the_exact_one_is_an_error(self, client: MooncakeClient, length: int):
        store = MooncakeFeatureStore(client.address, client=client)
        ref = store.put(big_ref(1), big(1))
        client.put_small({ref.feature_keys["last"]: b"x" * length})
        with pytest.raises(StoreError, match="b1, feature last: expected 8388608 bytes, found"):
            store.get(ref)
        assert store.health()["leases"] == 0

    def test_two_samples_with_equal_tokens_share_a_key(self, client: MooncakeClient):
        store = KeyedMooncakeStore(client.address, client=client)
        first = store.put(big_ref(1), big(1))
        twin = store.put(replace(big_ref(1), sample_id="twin"), big(2))
        assert store.health()["tensors"] == 1
        assert torch.equal(store.get(twin)[0]["last"], store.get(first)[0]["last"])

    def test_of_equal_keys_put_at_the_same_time_one_is_read_and_kept(self, client: MooncakeClient):
        stores = [KeyedMooncakeStore(client.address, orphan_age_s=0.0, client=client) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            refs = list(pool.map(lambda n: stores[n].put(big_ref(1), big(n)), range(4)))
        stores[0].gc()
        assert stores[0].health() | {"tensors": 1, "entries": 1} == stores[0].health()
        values = {float(store.get(ref)[0]["last"][0]) for store, ref in zip(stores, refs, strict=True)}
        assert len(values) == 1

    def test_views_of_one_memory_travel_together(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, client=client)
        table = torch.arange(4000.0).reshape(100, 40)
        tensors = {"whole": table, "top": table[:50], "again": table, "odd": table[3:5, 7:9]}
        ref = store.put(SampleRef("v", "", "", "", dict.fromkeys(tensors, ""), {}), tensors)
        found = store.get(ref)[0]
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())

    def test_a_ref_reads_its_own_sample_only(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, client=client)
        mine, theirs = (store.put(toy_ref(index), toy_tensors(toy_ref(index))) for index in (1, 2))
        for keys in (theirs.feature_keys, dict.fromkeys(mine.feature_keys, "toys/owner"), {"last": ""}):
            with pytest.raises(StoreError, match="s1: expected feature keys of one generation of this sample"):
                store.get(replace(mine, feature_keys=keys))
        with pytest.raises(StoreError, match="s1 is in the store mooncake://others, expected mooncake://toys"):
            store.get(replace(mine, feature_store_uri="mooncake://others"))
        missing = {"hf9": mine.feature_keys["last"].replace("last", "hf9")}
        with pytest.raises(StoreError, match=r"s1, feature hf9: the sample has no feature hf9, it has"):
            store.get(replace(mine, feature_keys=missing))


class TestDeaths:
    def test_what_a_killed_producer_published_is_read(self, client: MooncakeClient):
        producer = start_other(client, PRODUCE)
        refs = [SampleRef.from_json(line) for line in answers(producer, "{", 3)]
        kill(producer)
        store = MooncakeFeatureStore(client.address, client=client)
        for index, ref in enumerate(refs):
            assert torch.equal(store.get(ref)[0]["last"], torch.full((1 << 20,), float(index)))

    def test_the_next_consumer_goes_on_after_a_kill_under_lease(self, client: MooncakeClient):
        store = MooncakeFeatureStore(client.address, client=client)
        ref = store.put(big_ref(7), big(7))
        consumer = start_other(client, CONSUME, ref.to_json())
        assert answers(consumer, "7", 1) == ["7.0\n"]
        kill(consumer)
        assert torch.equal(store.get(ref)[0]["last"], big(7)["last"])


@pytest.mark.parametrize("victim", ["owner", "master"])
def test_a_lost_store_is_told_by_every_call_and_filled_again(tmp_path: Path, victim: str):
    with running_mooncake(tmp_path) as service:
        once, keyed = MooncakeFeatureStore(service.address), KeyedMooncakeStore(service.address)
        ref, kept = once.put(big_ref(1), big(1)), keyed.put(big_ref(2), big(2))
        os.kill(service.pid(victim), signal.SIGKILL)
        calls: list[Callable[[], object]] = [
            lambda: once.get(ref),
            lambda: once.put(big_ref(3), big(3)),
            lambda: keyed.get(kept),
            lambda: keyed.find_missing(kept.feature_keys.values()),
            keyed.health,
        ]
        for call in calls:
            with pytest.raises(StoreLostError, match="toys .* is lost"):
                call()
        service.restart()
        for call in calls:
            with pytest.raises(StoreLostError, match=r"was started again since it was opened.*reconnect\(\)"):
                call()
        for store in (once, keyed):
            store.reconnect()
        assert keyed.find_missing(kept.feature_keys.values()) == list(kept.feature_keys.values())
        with pytest.raises(StoreError, match="b1: .* is gone"):
            once.get(ref)
        assert torch.equal(once.get(once.put(big_ref(1), big(1)))[0]["last"], big(1)["last"])
        assert torch.equal(keyed.get(keyed.put(big_ref(2), big(2)))[0]["last"], big(2)["last"])


def test_a_put_that_waits_notices_that_the_store_is_lost(tmp_path: Path):
    with running_mooncake(tmp_path) as service:
        store = MooncakeFeatureStore(service.address, put_timeout_s=0.0)
        fill(store)
        waiting_store = MooncakeFeatureStore(service.address, put_timeout_s=HANG_S)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(waiting_store.put, big_ref(99), big(99))
            time.sleep(0.3)
            assert not waiting.done()
            os.kill(service.pid("owner"), signal.SIGKILL)
            with pytest.raises(StoreLostError, match="the process that owns its memory is dead"):
                waiting.result(HANG_S)
