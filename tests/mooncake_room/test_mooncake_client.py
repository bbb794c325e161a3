"""Codes of the real Mooncake, and what the client makes of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from mooncake_toys import SHORT_TTL_S, running_mooncake, within_a_lease
from torch import Tensor
from waiting import growing_limits, wait_until

from draftworks.errors import StoreError, StoreLostError
from draftworks.mooncake.address import Code
from draftworks.mooncake.client import MooncakeClient, Region
from draftworks.mooncake.service import MooncakeService

pytestmark = pytest.mark.mooncake
MIB = 1 << 20
KILLED_WRITER = """
import os, signal, sys, threading, time
import torch
from mooncake_toys import *
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient
client = MooncakeClient(MooncakeAddress(sys.argv[1], "toys"))
small, whole = torch.ones(4, dtype=torch.uint8), torch.ones(48 << 20, dtype=torch.uint8)
def kill_when_it_is_under_way():
    while client._library_store.get_size("toys/a") != -703:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill_when_it_is_under_way).start()
words = ["toys/a", "toys/b"], [small.data_ptr(), whole.data_ptr()], [small.nbytes, whole.nbytes]
client._library_store.batch_put_from(*words, client._pinned)
"""


def region(tensor: Tensor) -> Region:
    return Region(tensor.data_ptr(), tensor.nbytes, tensor)


def put(client: MooncakeClient, key: str, tensor: Tensor) -> int:
    with client.registered(region(tensor)):
        return client.put([key], [region(tensor)])[0]


def read(client: MooncakeClient, key: str, tensor: Tensor) -> int:
    with client.registered(region(tensor)):
        return client.read([key], [region(tensor)])[0]


def noise(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


class TestOneStore:
    @pytest.fixture(scope="class")
    @classmethod
    def service(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeService]:
        with running_mooncake(tmp_path_factory.mktemp("mooncake")) as service:
            yield service

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, service: MooncakeService) -> Iterator[MooncakeClient]:
        client = MooncakeClient(service.address)
        yield client
        client.close()

    @pytest.fixture(autouse=True)
    def empty(self, client: MooncakeClient) -> Iterator[None]:
        yield
        metrics = client.read_owner().metrics
        client.remove(
            [key for key in client.list_keys(metrics) if "/alive/" not in key and not key.endswith("/owner")],
            force=True,
        )

    def test_raw_buffers_go_in_and_out_of_any_number_of_clients(self, service: MooncakeService, client: MooncakeClient):
        tensors = [noise(length) for length in (1, 4096, 3 * MIB + 5)]
        keys = [f"toys/{index}" for index in range(3)]
        with client.registered(*map(region, tensors)):
            assert client.put(keys, [region(tensor) for tensor in tensors]) == [0, 0, 0]
        other = MooncakeClient(service.address)
        found = [torch.zeros_like(tensor) for tensor in tensors]
        with other.registered(*map(region, found)):
            assert other.read(keys, [region(tensor) for tensor in found]) == [tensor.nbytes for tensor in tensors]
        other.close()
        assert all(torch.equal(a, b) for a, b in zip(tensors, found, strict=True))
        assert client.exist([*keys, "toys/none"]) == [True, True, True, False]
        assert client.sizes(keys[2:]) == [tensors[2].nbytes]

    def test_a_longer_buffer_keeps_its_tail_and_the_length_tells(self, client: MooncakeClient):
        put(client, "toys/a", noise(1000))
        buffer = torch.full((1010,), 7, dtype=torch.uint8)
        assert read(client, "toys/a", buffer) == 1000
        assert buffer[1000:].tolist() == [7] * 10

    def test_a_shorter_buffer_is_refused(self, client: MooncakeClient):
        put(client, "toys/a", noise(1000))
        assert read(client, "toys/a", noise(999)) == Code.INVALID

    def test_an_empty_key_is_refused(self, client: MooncakeClient):
        assert put(client, "", noise(10)) == Code.INVALID

    def test_absent_objects_have_a_code(self, client: MooncakeClient):
        assert read(client, "toys/none", noise(10)) == Code.ABSENT
        assert client.sizes(["toys/none"]) == [Code.ABSENT]
        assert client.remove(["toys/none"]) == [Code.ABSENT]
        assert client.read_small(["toys/none"]) == [None]

    def test_putting_again_replaces_also_under_lease_and_mooncakes_own_put_keeps_the_old(self, client: MooncakeClient):
        old, new, found = noise(1000), noise(500), noise(1000)
        assert put(client, "toys/a", old) == 0
        assert client._library_store.put_from("toys/a", new.data_ptr(), 500, client._pinned) == 0
        assert read(client, "toys/a", found) == 1000
        assert torch.equal(found, old)
        assert put(client, "toys/a", new) == 0
        assert read(client, "toys/a", found) == 500
        assert torch.equal(found[:500], new)

    def test_small_objects_are_replaced_and_read_together(self, client: MooncakeClient):
        for content in (b"one", b"longer than one", b"1"):
            assert client.put_small({"toys/a": content, "toys/b": b"b"}) == [0, 0]
            assert client.read_small(["toys/a", "toys/none", "toys/b"]) == [content, None, b"b"]

    @pytest.mark.parametrize("look", ["read", "exist", "size"])
    def test_what_was_looked_at_lately_is_removed_by_force_or_later(self, client: MooncakeClient, look: str):
        looks = {"read": lambda key: read(client, key, noise(10)), "exist": lambda key: client.exist([key])}
        keys = ["toys/a", "toys/b"]

        def look_and_remove() -> list[int]:
            for key in keys:
                put(client, key, noise(10))
                looks.get(look, lambda key: client.sizes([key]))(key)
            return client.remove(keys)

        assert within_a_lease(look_and_remove) == [Code.LEASED, Code.LEASED]
        assert client.remove(["toys/a"], force=True) == [0]
        wait_until(lambda: client.remove(["toys/b"]) == [0], "the end of the lease")

    def test_a_full_store_says_so_and_loses_nothing(self, client: MooncakeClient):
        block = noise(16 * MIB)
        stored = 0
        while (code := put(client, f"toys/{stored}", block)) == 0:
            stored += 1
        assert code == Code.NO_SPACE
        assert stored >= 2
        time.sleep(1.0)
        for index in range(stored):
            found = torch.zeros_like(block)
            assert read(client, f"toys/{index}", found) == block.nbytes
            assert torch.equal(found, block)
        assert put(client, "toys/again", block) == Code.NO_SPACE
        client.remove(["toys/0"], force=True)
        assert put(client, "toys/again", block) == 0

    def test_overlapping_memory_is_not_registered_twice_and_equal_memory_is(self, client: MooncakeClient):
        tensor = noise(1000)
        with client.registered(region(tensor), region(tensor)):
            assert not client.register(region(tensor[10:20]))
            assert client.put(["toys/a"], [region(tensor)]) == [0]
        assert client.register(region(tensor[10:20]))
        client.unregister(region(tensor[10:20]))

    def test_keys_of_this_store_are_listed(self, client: MooncakeClient):
        for key in ("toys/a", "toys/b/c", "others/a"):
            put(client, key, noise(10))
        record = client.read_owner()
        own = [f"toys/alive/{record.incarnation}", "toys/owner"]
        assert sorted(client.list_keys(record.metrics)) == sorted(["toys/a", "toys/b/c", *own])
        client.remove(["others/a"], force=True)


def test_a_key_that_a_killed_writer_left_unfinished_is_absent_and_can_be_put(tmp_path: Path):
    with running_mooncake(tmp_path) as service:
        client = MooncakeClient(service.address)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", KILLED_WRITER, client.address.master]
        subprocess.run(command, env=environment, check=False, timeout=300)
        assert client._library_store.put_from("toys/a", (data := noise(4)).data_ptr(), 4, client._pinned) == 0
        assert read(client, "toys/a", noise(4)) == Code.UNFINISHED
        assert client.exist(["toys/a"]) == [False]
        assert client.read_small(["toys/a"]) == [None]
        assert client.put_small({"toys/a": b"now"}) == [0]
        assert client.read_small(["toys/a"]) == [b"now"]
        del data


def test_a_lease_that_runs_out_while_bytes_travel_is_read_again_or_told(tmp_path: Path):
    with running_mooncake(tmp_path, segment_bytes=80 * MIB, lease_ttl_s=0.001) as service:
        client = MooncakeClient(service.address)
        client.address = replace(service.address, timeout_s=1.0)
        block, found = noise(16 * MIB), [torch.zeros(16 * MIB, dtype=torch.uint8) for _ in range(4)]
        keys = [f"toys/{index}" for index in range(4)]
        for key in keys:
            assert put(client, key, block) == 0
        words = keys, [tensor.data_ptr() for tensor in found], [tensor.nbytes for tensor in found]
        with client.registered(*map(region, found)):
            assert Code.LEASE_EXPIRED in client._library_store.batch_get_into(*words)
            with pytest.raises(
                StoreError, match=r"leases of \d of 4 objects ran out .* longer lease_ttl_s|lease_ttl_s longer"
            ):
                client.read(keys, [region(tensor) for tensor in found])


def test_a_dead_owner_is_told_at_once_though_mooncake_says_all_is_well(tmp_path: Path):
    with running_mooncake(tmp_path, client_ttl_s=SHORT_TTL_S) as service:
        client = MooncakeClient(service.address)
        assert put(client, "toys/a", noise(1000)) == 0
        os.kill(service.pid("owner"), signal.SIGKILL)
        with pytest.raises(StoreLostError, match=r"the process that owns its memory is dead .*code -800"):
            read(client, "toys/a", noise(1000))
        with pytest.raises(StoreLostError, match="toys .* is lost"):
            client.read_owner()
        assert client.exist(["toys/a"]) == [True]
        assert client._library_store.health_check() == 0
        wait_until(lambda: client.exist(["toys/a"]) != [True], "that the master gives the owner up")
        assert put(client, "toys/b", noise(1000)) == Code.NO_SPACE
        with pytest.raises(StoreLostError, match="nobody owns its memory any more"):
            client.read_owner()


def connect_in_time(service: MooncakeService) -> MooncakeClient:
    """Return a client with a time limit that is short, but in which this machine can connect and read."""
    for limit in growing_limits(2.0):
        with suppress(StoreLostError):
            client = MooncakeClient(replace(service.address, timeout_s=limit))
            client.read_owner()
            return client
    raise AssertionError("no limit was long enough")


@pytest.mark.parametrize("victim", ["owner", "master"])
def test_a_stopped_process_is_told_within_the_timeout(tmp_path: Path, victim: str):
    with running_mooncake(tmp_path) as service:
        client = connect_in_time(service)
        stopped = psutil.Process(service.pid(victim))
        stopped.suspend()
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        with pytest.raises(
            StoreLostError, match=rf"toys .* is lost|toys .* has not answered for {client.address.timeout_s:.0f} s"
        ):
            client.read_owner()


CALLS: tuple[Callable[[MooncakeClient], object], ...] = (
    lambda client: client.exist(["toys/a"]),
    lambda client: client.sizes(["toys/a"]),
    lambda client: client.remove(["toys/a"], force=True),
    lambda client: client.put_small({"toys/a": b"a"}),
    lambda client: client.read_small(["toys/a"]),
)


def test_a_closed_connection_is_told_and_a_call_under_way_comes_to_its_end(tmp_path: Path):
    """The library itself ends the process by SIGSEGV in both cases."""
    with running_mooncake(tmp_path) as service, ThreadPoolExecutor(1) as another:
        client = MooncakeClient(service.address)
        master = psutil.Process(service.pid("master"))
        master.suspend()
        wait_until(lambda: master.status() == psutil.STATUS_STOPPED)
        sizes = another.submit(client.sizes, ["toys/a", "toys/b", "toys/c"])
        wait_until(lambda: client._calls == 1)
        client.close()
        master.resume()
        assert sizes.result() == [Code.ABSENT] * 3
        wait_until(lambda: client._calls == 0)
        for call in CALLS:
            with pytest.raises(StoreLostError, match="toys .*: this connection was closed meanwhile"):
                call(client)
        client.close()


def test_a_dead_master_is_told_and_a_new_one_has_forgotten_all(tmp_path: Path):
    with running_mooncake(tmp_path) as service:
        client = MooncakeClient(service.address)
        put(client, "toys/a", noise(1000))
        before = client.read_owner()
        os.kill(service.pid("master"), signal.SIGKILL)
        for call in (lambda: read(client, "toys/a", noise(1000)), lambda: client.exist(["toys/a"]), client.read_owner):
            with pytest.raises(StoreLostError, match="master .* is dead or unreachable"):
                call()
        service.restart()
        assert client.read_owner().incarnation != before.incarnation
        assert read(client, "toys/a", noise(1000)) == Code.ABSENT
        assert put(client, "toys/a", noise(1000)) == 0


def test_a_master_that_does_not_listen_is_told_at_once(tmp_path: Path):
    with running_mooncake(tmp_path) as service:
        address = service.address
    with pytest.raises(StoreLostError, match=r"is dead or unreachable: .*refused.*Start its service"):
        MooncakeClient(address)
