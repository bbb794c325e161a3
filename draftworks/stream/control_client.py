"""The metadata store of a process on another host: every call goes to the control server."""

from __future__ import annotations

import hmac
import inspect
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from draftworks import errors
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.stream.control_wire import (
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
from draftworks.stream.metadata_store import MetadataStore, require_refs, require_tasks

Method = TypeVar("Method", bound=Callable[..., Any])


def _remote(method: Method) -> Method:
    """Return the method that asks the server for the call of the same name, with the same arguments but `now`."""
    parameters = inspect.signature(method)

    @wraps(method)
    def call(self: RemoteMetadataStore, *given: Any, **named: Any) -> Any:
        arguments = parameters.bind(self, *given, **named).arguments
        del arguments["self"]
        arguments.pop("now", None)
        require_tasks(arguments.get("tasks", ()))
        require_refs(arguments.get("refs", ()))
        return self._call(
            method.__name__,
            **{name: tuple(each) if isinstance(each, list) else each for name, each in arguments.items()},
        )

    call.__isabstractmethod__ = False  # type: ignore[attr-defined]  # `wraps` has copied it
    return call  # type: ignore[return-value]


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

    add_tasks = _remote(MetadataStore.add_tasks)
    lease_tasks = _remote(MetadataStore.lease_tasks)
    renew_leases = _remote(MetadataStore.renew_leases)
    fail_tasks = _remote(MetadataStore.fail_tasks)
    commit_samples = _remote(MetadataStore.commit_samples)
    find_uncommitted = _remote(MetadataStore.find_uncommitted)
    read_refs = _remote(MetadataStore.read_refs)
    ack_samples = _remote(MetadataStore.ack_samples)
    read_order = _remote(MetadataStore.read_order)
    record_checkpoint = _remote(MetadataStore.record_checkpoint)
    free_keys = _remote(MetadataStore.free_keys)
    record_fact = _remote(MetadataStore.record_fact)
    read_facts = _remote(MetadataStore.read_facts)
    read_progress = _remote(MetadataStore.read_progress)
    read_consumers = _remote(MetadataStore.read_consumers)
    record_left = _remote(MetadataStore.record_left)
    rewind = _remote(MetadataStore.rewind)
    requeue_lost = _remote(MetadataStore.requeue_lost)
    count_tasks = _remote(MetadataStore.count_tasks)
    read_dead_letters = _remote(MetadataStore.read_dead_letters)
    hold_consumer = _remote(MetadataStore.hold_consumer)
    release_consumer = _remote(MetadataStore.release_consumer)

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
