"""A Mooncake store's two processes, started and watched: the master and the owner of the memory."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, RLock, Thread, current_thread
from typing import Any

import draftworks
from draftworks.distributed import stop_signals
from draftworks.errors import ConfigError, StoreLostError
from draftworks.mooncake.address import (
    ADDRESS_FILE,
    MooncakeAddress,
    build_environment,
    find_master_program,
    require_store_id,
)
from draftworks.mooncake.owner import OwnerOrder
from draftworks.storage.files import publish_file

LOG_TAIL_LINES = 20
MIN_SEGMENT_BYTES = 16 << 20
"""Mooncake accepts less, and then finds no room in it."""
PUT_RELEASE_S = 120
"""Seconds after which memory comes back that a producer was killed in the middle of filling."""
_LOG_TAIL_BYTES = 32 << 10
_POLL_S = 0.1
_PORT_ATTEMPTS = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MooncakeOptions:
    """Options of a Mooncake store.

    Attributes:
        segment_bytes: memory of the store; what is put beyond it waits or is refused.
        store_id: the store's name in references and keys.
        host: the address at which other processes reach it. There is no authentication: other than on the loopback
            interface, the network must be yours alone.
        lease_ttl_s: seconds for which Mooncake keeps what was read or looked up. It has to exceed the time of the
            longest batch that is read, and memory that is freed after a read comes back that much later.
        client_ttl_s: seconds for which the owner may not answer the master until all it holds is given up.
        timeout_s: as in `MooncakeAddress`.
        start_timeout_s: seconds until master and owner have to be ready.
    """

    segment_bytes: int
    store_id: str = "features"
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    lease_ttl_s: float = 10.0
    client_ttl_s: float = 30.0
    timeout_s: float = 30.0
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require_store_id(self.store_id)
        if self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(f"a Mooncake store of {self.segment_bytes} bytes: expected at least {MIN_SEGMENT_BYTES}")
        for name in ("lease_ttl_s", "client_ttl_s", "timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a Mooncake store: expected a number above 0, found {getattr(self, name)}")


class MooncakeService:
    """Master and owner of a store, as child processes that end at the latest with this process.

    If either dies, all that the store held is lost, and the other is of no use. `check` tells that at once, and
    `restart` makes an empty store at the same address.

    Args:
        folder: folder for logs and the address file; created if absent. No other service may use it at the same time.
        on_loss: called once in the watching thread when a process has died by itself, with the reason.
    """

    def __init__(self, options: MooncakeOptions, folder: Path, on_loss: Callable[[str], None] | None = None) -> None:
        self.options = options
        self._folder = folder
        self._on_loss = on_loss
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: tuple[int, int] | None = None
        self._lock = RLock()
        self._stopping = Event()
        self._watcher: Thread | None = None
        # The kernel ends a child when the *thread* that started it ends, so this object keeps a thread for that.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mooncake-starter")

    @property
    def address(self) -> MooncakeAddress:
        if self._ports is None:
            raise StoreLostError("the Mooncake service has not been started")
        words = {name: getattr(self.options, name) for name in ("store_id", "host", "protocol", "devices", "timeout_s")}
        return MooncakeAddress(master=f"{self.options.host}:{self._ports[0]}", **words)

    @property
    def address_file(self) -> Path:
        """From which other processes read the address while the service runs."""
        return self._folder / ADDRESS_FILE

    def pid(self, name: str) -> int:
        """Return the pid of the process `master` or `owner`."""
        return self._processes[name].pid

    def log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def start(self) -> MooncakeAddress:
        """Start master and owner, and wait until the store can be used.

        Raises:
            ConfigError: Mooncake is not installed.
            StoreLostError: one of them ended or was not ready in time; the message has the end of its log.
        """
        program = find_master_program()
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            if self._processes:
                raise StoreLostError("the Mooncake service runs already: stop it first")
            self._stopping.clear()
            try:
                self._start_master(program)
                self._start_owner()
            except BaseException:
                self._end_processes()
                raise
            with publish_file(self.address_file) as staged:
                staged.write_text(self.address.to_json())
        self._watcher = Thread(target=self._watch, name="mooncake-watcher", daemon=True)
        self._watcher.start()
        return self.address

    def find_problem(self) -> str | None:
        """Return which process has died, with the end of its log; None while both run."""
        with self._lock:
            if not self._processes:
                return "the Mooncake service does not run"
            for name, process in self._processes.items():
                code = process.poll()
                if code is not None:
                    return (
                        f"{_describe(name)} has ended with code {code}. The end of {self.log_file(name)}:\n"
                        f"{self._read_log_tail(name)}"
                    )
        return None

    def check(self) -> None:
        """Raise StoreLostError, which names the process and the end of its log, if one has died."""
        problem = self.find_problem()
        if problem is not None:
            raise StoreLostError(
                f"Mooncake store {self.options.store_id} is lost: {problem}\nWhat it held has to be made again"
            )

    def restart(self) -> MooncakeAddress:
        """Start again, at the same address and with nothing in the store."""
        self.stop()
        return self.start()

    def stop(self) -> None:
        """End both processes, and with them all that the store holds."""
        self._stopping.set()
        with self._lock:
            self._end_processes()
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not current_thread():
            watcher.join()

    def __enter__(self) -> MooncakeService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_master(self, program: Path) -> None:
        """Start the master on ports that are free, or on those it had before."""
        for attempt in range(_PORT_ATTEMPTS):
            ports = self._ports or (_find_free_port(self.options.host), _find_free_port(self.options.host))
            try:
                self._spawn("master", [str(program), *self._build_master_arguments(ports)])
                self._wait("master", lambda ports=ports: all(_listens(self.options.host, port) for port in ports))
            except StoreLostError:
                self._end_processes()
                if self._ports is not None or attempt == _PORT_ATTEMPTS - 1:
                    raise
                continue  # somebody may have taken a port meanwhile
            self._ports = ports
            return

    def _start_owner(self) -> None:
        assert self._ports is not None
        metrics = f"{self.options.host}:{self._ports[1]}"
        sizes: dict[str, Any] = {"segment_bytes": self.options.segment_bytes, "lease_ttl_s": self.options.lease_ttl_s}
        order = OwnerOrder(
            self.address, uuid.uuid4().hex, patience_s=self.options.client_ttl_s, metrics=metrics, **sizes
        )
        order.write(self._folder)
        ready = order.ready_file(self._folder)
        try:
            self._spawn("owner", [sys.executable, "-P", "-m", "draftworks.mooncake.owner", str(self._folder.resolve())])
            self._wait("owner", ready.exists)
        finally:
            ready.unlink(missing_ok=True)

    def _build_master_arguments(self, ports: tuple[int, int]) -> list[str]:
        values: dict[str, str | int] = {
            "rpc_address": self.options.host,
            "rpc_port": ports[0],
            "metrics_host": self.options.host,
            "metrics_port": ports[1],
            "default_kv_lease_ttl": round(self.options.lease_ttl_s * 1000),
            "client_ttl": max(1, round(self.options.client_ttl_s)),
            "put_start_release_timeout_sec": PUT_RELEASE_S,
            "enable_metric_reporting": "false",
        }
        return [f"--{name}={value}" for name, value in values.items()]

    def _spawn(self, name: str, command: list[str]) -> None:
        self._processes[name] = self._starter.submit(self._popen, name, command).result()

    def _popen(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        package = str(Path(draftworks.__file__).resolve().parents[1])
        environment = build_environment()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        with self.log_file(name).open("ab") as log_stream:
            return subprocess.Popen(
                [*stop_signals.build_shim_command(), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log_stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.options.start_timeout_s
        while time.monotonic() < deadline:
            problem = self.find_problem()
            if problem is not None:
                raise StoreLostError(f"the Mooncake store {self.options.store_id} cannot be started: {problem}")
            if ready():
                return
            time.sleep(_POLL_S)
        raise StoreLostError(
            f"{_describe(name)} was not ready within {self.options.start_timeout_s:g} s (start_timeout_s). The end of "
            f"{self.log_file(name)}:\n{self._read_log_tail(name)}"
        )

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            problem = self.find_problem()
            if problem is None or self._stopping.is_set():
                continue
            self.address_file.unlink(missing_ok=True)
            log.error("Mooncake store %s is lost: %s", self.options.store_id, problem)
            if self._on_loss is not None:
                self._on_loss(problem)
            return

    def _end_processes(self) -> None:
        self.address_file.unlink(missing_ok=True)
        for process in self._processes.values():
            process.kill()  # nothing of either outlives it, so there is nothing to end in order
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _read_log_tail(self, name: str) -> str:
        with self.log_file(name).open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = stream.read().decode("utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])


def _describe(name: str) -> str:
    return {"master": "its master (mooncake_master)", "owner": "the process that owns its memory"}[name]


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _find_free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
