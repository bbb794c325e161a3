"""The control plane over a socket: across hosts, through kills of its owner, and against strangers."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import control_worker
import pytest
from dataflow_toys import TOKEN, Clock, ServedStore, controller_of, ids_of, toy_slim_ref, toy_task
from network_namespaces import LOOPBACK, Host, two_hosts
from waiting import HANG_S

from draftworks.errors import ConfigError, StoreError
from draftworks.stream.control_client import RemoteMetadataStore
from draftworks.stream.control_server import ControlServer
from draftworks.stream.control_wire import TOKEN_ENV, load_token, receive_message, send_message
from draftworks.stream.controller import DataFlowController
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore

ROOT = Path(__file__).resolve().parents[2]
TASKS = 12


@pytest.fixture
def served() -> Iterator[ServedStore]:
    store = ServedStore(InMemoryMetadataStore(), Clock())
    yield store
    store.close()


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        if request.param == "loopback":
            yield LOOPBACK, LOOPBACK
            return
        try:
            found = stack.enter_context(two_hosts())
        except RuntimeError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found


def start_owner(host: Host, database: Path, port: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "draftworks.programs.control", str(database), "--listen", f"{host.address}:{port}"]
    env = {**os.environ, TOKEN_ENV: TOKEN.decode()}
    owner = subprocess.Popen([*host.prefix, *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    line = owner.stdout.readline()
    assert line.startswith("control server on "), line
    return owner, line.split()[-1]


def test_workers_of_another_host_go_on_when_the_owner_is_killed_and_started_again(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    here, there = hosts
    database = tmp_path / "plane.db"
    tasks = [toy_task(number) for number in range(TASKS)]
    DataFlowController("run", SQLiteMetadataStore(database), max_attempts=9).add_tasks(tasks)
    owner, address = start_owner(here, database, 0)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "toys")}
    command = [*there.prefix, sys.executable, control_worker.__file__, address, str(TASKS)]
    workers = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for _ in range(2):
            assert workers[0].stdout is not None
            workers[0].stdout.readline()  # in the middle of its work
            os.kill(owner.pid, signal.SIGKILL)
            owner.wait()
            time.sleep(0.2)
            owner, again = start_owner(here, database, int(address.rpartition(":")[2]))
            assert again == address
        assert [worker.wait() for worker in workers] == [0, 0]
        owner.terminate()
        assert owner.wait() == 0
    finally:
        for process in (owner, *workers):
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
    controller = DataFlowController("run", SQLiteMetadataStore(database))
    assert controller.count_tasks().done == TASKS
    assert sorted(ids_of(controller.iterate_refs())) == sorted(each for task in tasks for each in task.sample_ids)
    assert list(controller.iterate_refs(acked=False)) == []


def test_a_server_that_stays_away_is_one_clear_error_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StoreError, match=f"{address} could not be reached for 0 s .*Start it again"):
        controller_of(RemoteMetadataStore(address, TOKEN, retry_s=0.4), Clock()).count_tasks()


def test_a_server_that_says_nothing_is_given_up(served: ServedStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        store = RemoteMetadataStore(address, TOKEN, retry_s=0.4, call_timeout_s=0.2)
        with pytest.raises(StoreError, match="could not be reached"):
            controller_of(store, Clock()).count_tasks()


def test_strangers_are_refused_on_both_sides(served: ServedStore) -> None:
    stranger = RemoteMetadataStore(served.server.address, b"another secret, as long")
    with pytest.raises(ConfigError, match="another shared secret"):
        controller_of(stranger, Clock()).count_tasks()
    host, _, port = served.server.address.rpartition(":")
    for hello in ({"nonce": "x", "proof": "y"}, {}, [], "text", 7):
        with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
            nonce = receive_message(connection)["nonce"]
            assert len(nonce) == 32
            send_message(connection, hello)
            assert receive_message(connection) == {"refused": True}
            assert connection.recv(1) == b""


@pytest.mark.parametrize("frame", [struct.pack(">I", 1 << 31) + b"x", b"\x00", struct.pack(">I", 3) + b"{{{", b""])
def test_what_is_no_message_ends_that_connection_only(frame: bytes, served: ServedStore) -> None:
    host, _, port = served.server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        receive_message(connection)
        with suppress(ConnectionError):  # the server may have closed it already
            connection.sendall(frame)
            with suppress(OSError):  # not connected any more
                connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert controller_of(served, Clock()).count_tasks().open == 0


@pytest.mark.parametrize(
    "request_",
    [
        {"method": "close", "arguments": {"m": {}}},
        {"method": "_call", "arguments": {"m": {}}},
        {"method": "count_tasks", "arguments": {"d": "Popen", "f": {}}},
        {"method": "count_tasks", "arguments": {"m": {"wrong": 1}}},
        {"method": "count_tasks"},
        [],
    ],
)
def test_only_the_calls_of_a_store_are_answered(request_: object, served: ServedStore) -> None:
    controller_of(served, Clock()).count_tasks()
    assert served._connection is not None
    send_message(served._connection, request_)
    assert receive_message(served._connection)["error"] == "StoreError"
    assert controller_of(served, Clock()).count_tasks().open == 0


def test_a_batch_that_is_too_large_says_so_and_a_smaller_one_passes(served: ServedStore) -> None:
    served._max_message_bytes = 2000
    controller = controller_of(served, Clock())
    with pytest.raises(StoreError, match="call with smaller batches"):
        controller.commit_samples([toy_slim_ref(f"s{number}") for number in range(100)])
    assert controller.commit_samples([toy_slim_ref("a")]).committed == ("a",)


def test_the_clock_of_the_server_decides() -> None:
    served = ServedStore(InMemoryMetadataStore(), Clock(1000.0))
    fast = controller_of(served, Clock(10**9))
    fast.add_tasks([toy_task(0)])
    (lease,) = fast.lease_tasks("a")
    assert lease.expires_at == 1010.0
    assert fast.count_tasks().leased == 1
    served.close()


def test_secrets_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    assert load_token(tmp_path / "token") == TOKEN
    monkeypatch.setenv(TOKEN_ENV, f" {TOKEN.decode()}\n")
    assert load_token() == TOKEN
    monkeypatch.setenv(TOKEN_ENV, "short")
    for missing in (tmp_path / "absent", None):
        with pytest.raises(ConfigError, match="shared secret"):
            load_token(missing)
    for make in (
        lambda: RemoteMetadataStore("localhost:1", b"short"),
        lambda: ControlServer(InMemoryMetadataStore(), b""),
    ):
        with pytest.raises(ConfigError, match="at least 16 bytes"):
            make()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:70000"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        RemoteMetadataStore(address, TOKEN)


def test_a_port_that_is_taken_is_one_clear_error(served: ServedStore) -> None:
    host, _, port = served.server.address.rpartition(":")
    with pytest.raises(StoreError, match=f"cannot listen on {host}:{port}"):
        ControlServer(InMemoryMetadataStore(), TOKEN, host, int(port))
