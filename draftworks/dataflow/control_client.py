"""The metadata store of a process on another host: every call goes to the control server."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from draftworks import errors
from draftworks.dataflow.control_wire import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    from_wire,
    prove,
    receive_message,
    require_token,
    send_message,
    to_wire,
)
from draftworks.dataflow.metadata_store import (
    CommitResult,
    ConsumerProgress,
    MetadataStore,
    RefPage,
    require_refs,
    require_tasks,
)
from draftworks.dataflow.tasks import DeadLetter, PromptTask, TaskCounts, TaskFailure, TaskLease
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.features.contracts import SampleRef


class RemoteMetadataStore(MetadataStore):
    """A metadata store behind a control server. Thread-safe; a forked child opens its own connection.

    A call that fails on the way is repeated until `retry_s` have passed, so that the server may be started again
    meanwhile. Times are the server's: `now` of the calls is not used.

    Args:
        address: `host:port` of the server.
        retry_s: how long a call is repeated while the server cannot be reached.
        call_timeout_s: how long one answer may take.

    Raises:
        ConfigError: the address is none, or the token is too short.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        retry_s: float = 120.0,
        call_timeout_s: float = 90.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        host, colon, port = address.rpartition(":")
        if not host or not colon or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"control server: expected an address as host:port, found {address!r}")
        self._place = (host.strip("[]"), int(port))
        self._address = address
        self._token = require_token(token, "control client")
        self._retry_s = retry_s
        self._call_timeout_s = call_timeout_s
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._pid = os.getpid()

    def add_tasks(self, run_id: str, tasks: Sequence[PromptTask], max_attempts: int) -> int:
        require_tasks(tasks)
        return self._call("add_tasks", run_id=run_id, tasks=tuple(tasks), max_attempts=max_attempts)

    def lease_tasks(
        self, run_id: str, worker: str, limit: int, duration_s: float, now: float, request_id: str, max_step: int | None
    ) -> tuple[TaskLease, ...]:
        return self._call(
            "lease_tasks",
            run_id=run_id,
            worker=worker,
            limit=limit,
            duration_s=duration_s,
            request_id=request_id,
            max_step=max_step,
        )

    def renew_leases(
        self, run_id: str, leases: Sequence[TaskLease], duration_s: float, now: float
    ) -> tuple[TaskLease, ...]:
        return self._call("renew_leases", run_id=run_id, leases=tuple(leases), duration_s=duration_s)

    def fail_tasks(self, run_id: str, failures: Sequence[TaskFailure], now: float) -> tuple[str, ...]:
        return self._call("fail_tasks", run_id=run_id, failures=tuple(failures))

    def commit_samples(
        self, run_id: str, refs: Sequence[SampleRef], done: Sequence[TaskLease], now: float
    ) -> CommitResult:
        require_refs(refs)
        return self._call("commit_samples", run_id=run_id, refs=tuple(refs), done=tuple(done))

    def find_uncommitted(self, run_id: str, sample_ids: Sequence[str]) -> tuple[str, ...]:
        return self._call("find_uncommitted", run_id=run_id, sample_ids=tuple(sample_ids))

    def read_refs(self, run_id: str, cursor: int, limit: int, consumer: str, acked: bool | None, uses: int) -> RefPage:
        return self._call(
            "read_refs", run_id=run_id, cursor=cursor, limit=limit, consumer=consumer, acked=acked, uses=uses
        )

    def ack_samples(
        self,
        run_id: str,
        consumer: str,
        owner: str,
        sample_ids: Sequence[str],
        global_step: int,
        epoch: int,
        now: float,
    ) -> int:
        return self._call(
            "ack_samples",
            run_id=run_id,
            consumer=consumer,
            owner=owner,
            sample_ids=tuple(sample_ids),
            global_step=global_step,
            epoch=epoch,
        )

    def record_checkpoint(self, run_id: str, consumer: str, global_step: int) -> None:
        self._call("record_checkpoint", run_id=run_id, consumer=consumer, global_step=global_step)

    def read_progress(self, run_id: str, consumer: str) -> ConsumerProgress:
        return self._call("read_progress", run_id=run_id, consumer=consumer)

    def read_consumers(self, run_id: str) -> dict[str, ConsumerProgress]:
        return self._call("read_consumers", run_id=run_id)

    def record_left(self, run_id: str, consumer: str, reason: str) -> None:
        self._call("record_left", run_id=run_id, consumer=consumer, reason=reason)

    def rewind(self, run_id: str, consumer: str, owner: str, global_step: int, now: float) -> int:
        return self._call("rewind", run_id=run_id, consumer=consumer, owner=owner, global_step=global_step)

    def requeue_lost(self, run_id: str, sample_ids: Sequence[str]) -> tuple[str, ...]:
        return self._call("requeue_lost", run_id=run_id, sample_ids=tuple(sample_ids))

    def count_tasks(self, run_id: str, now: float) -> TaskCounts:
        return self._call("count_tasks", run_id=run_id)

    def read_dead_letters(self, run_id: str) -> tuple[DeadLetter, ...]:
        return self._call("read_dead_letters", run_id=run_id)

    def hold_consumer(self, run_id: str, consumer: str, owner: str, duration_s: float, now: float) -> None:
        self._call("hold_consumer", run_id=run_id, consumer=consumer, owner=owner, duration_s=duration_s)

    def release_consumer(self, run_id: str, consumer: str, owner: str) -> None:
        self._call("release_consumer", run_id=run_id, consumer=consumer, owner=owner)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _call(self, method: str, **arguments: Any) -> Any:
        """Return the server's result.

        Raises:
            DraftworksError: the one that the server raised.
            StoreError: the server could not be reached for `retry_s`.
            ConfigError: the server does not know the same secret, or is of another version.
        """
        request = {"method": method, "arguments": to_wire(arguments)}
        deadline, pause = time.monotonic() + self._retry_s, 0.05
        while True:
            try:
                with self._lock:
                    return self._exchange(request)
            except OSError as error:
                if time.monotonic() + pause > deadline:
                    raise StoreError(
                        f"the control server {self._address} could not be reached for {self._retry_s:.0f} s "
                        f"({type(error).__name__}: {error}). Start it again on its database and port"
                    ) from error
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    def _exchange(self, request: dict[str, Any]) -> Any:
        try:
            connection = self._own_connection()
            send_message(connection, request, self._max_message_bytes)
            answer = receive_message(connection, self._max_message_bytes)
        except (OSError, DraftworksError):
            self._disconnect()
            raise
        if isinstance(answer, dict) and "result" in answer:
            return from_wire(answer["result"])
        if isinstance(answer, dict) and "error" in answer:
            kind = getattr(errors, str(answer["error"]), StoreError)
            known = isinstance(kind, type) and issubclass(kind, DraftworksError)
            raise (kind if known else StoreError)(str(answer.get("message", "")))
        self._disconnect()
        raise ConnectionError("the answer is not one of a control server")

    def _own_connection(self) -> socket.socket:
        if self._pid != os.getpid():
            self._connection, self._pid = None, os.getpid()
        if self._connection is None:
            connection = socket.create_connection(self._place, timeout=min(10.0, self._call_timeout_s))
            try:
                self._introduce(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _introduce(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = receive_message(connection, MAX_HELLO_BYTES)
        if not isinstance(hello, dict) or hello.get("protocol") != PROTOCOL:
            found = hello.get("protocol") if isinstance(hello, dict) else hello
            raise ConfigError(
                f"control server {self._address}: expected protocol {PROTOCOL}, found {found!r}: use the same version of "
                "Draftworks on both hosts"
            )
        theirs, mine = str(hello.get("nonce")), secrets.token_hex(16)
        send_message(connection, {"nonce": mine, "proof": prove(self._token, "client", theirs, mine)})
        answer = receive_message(connection, MAX_HELLO_BYTES)
        proof = str(answer.get("proof", "")) if isinstance(answer, dict) else ""
        if not hmac.compare_digest(proof.encode(), prove(self._token, "server", theirs, mine).encode()):
            raise ConfigError(
                f"control server {self._address}: it has another shared secret than this process. Give both the same one"
            )
        connection.settimeout(self._call_timeout_s)

    def _disconnect(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
        self._connection = None
