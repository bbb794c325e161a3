"""Serves a metadata store to processes of other hosts, from the process that owns the database.

The server keeps nothing of its own: it can be killed and started again on the same database and port, and clients go on.
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from draftworks.errors import DraftworksError, StoreError
from draftworks.stream.control_wire import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    MessageTooLarge,
    from_wire,
    prove,
    receive_message,
    require_token,
    send_message,
    to_wire,
)
from draftworks.stream.metadata_store import MetadataStore

log = logging.getLogger(__name__)
CALLS = {
    name: inspect.signature(getattr(MetadataStore, name)).parameters
    for name in sorted(MetadataStore.__abstractmethods__ - {"close"})
}
"""The methods that a client may call, with their parameters. `now` is the server's, so that one clock decides."""


class ControlServer:
    """A metadata store on a TCP port, one thread per connection. Starts at once; `close` ends it.

    Args:
        host: the address to listen on; the default is reached from this host only.
        port: 0 takes a free one, see `address`. A server that is started again takes the same one.
        token: the shared secret. Connections are authenticated, not encrypted: use a network that is trusted.
        idle_s: a connection without a call for this long is closed; the client opens another.
        max_connections: further ones are closed at once; their clients try again.

    Raises:
        ConfigError: the token is too short.
        StoreError: the address cannot be listened on.
    """

    def __init__(
        self,
        store: MetadataStore,
        token: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = time.time,
        idle_s: float = 600.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_connections: int = 512,
    ) -> None:
        self.store = store
        self.token = require_token(token, "control server")
        self.clock = clock
        self.idle_s = idle_s
        self.max_message_bytes = max_message_bytes
        self.max_connections = max_connections
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        try:
            self._server = _Listener((host, port), self)
        except OSError as error:
            raise StoreError(f"the control server cannot listen on {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port`, for clients."""
        host, port = self._server.server_address[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        """Stop listening and close all connections. The store stays open."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def serve(self, connection: socket.socket) -> None:
        """Answer the calls of one connection until it ends."""
        with self._lock:
            if len(self._connections) >= self.max_connections:
                log.warning("the control server has %d connections and takes no more", self.max_connections)
                return
            self._connections.add(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.settimeout(10.0)
            if self._authenticate(connection):
                connection.settimeout(self.idle_s)
                while True:
                    self._answer(connection)
        except MessageTooLarge as error:
            with contextlib.suppress(OSError):
                send_message(connection, _describe(error))
        except OSError:
            pass  # ended, or idle for too long
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _authenticate(self, connection: socket.socket) -> bool:
        mine = secrets.token_hex(16)
        send_message(connection, {"protocol": PROTOCOL, "nonce": mine})
        hello = receive_message(connection, MAX_HELLO_BYTES)
        theirs, proof = (str(hello.get(name, "")) if isinstance(hello, dict) else "" for name in ("nonce", "proof"))
        if not hmac.compare_digest(proof.encode(), prove(self.token, "client", mine, theirs).encode()):
            log.warning("the control server refused %s: it does not know the shared secret", connection.getpeername())
            send_message(connection, {"refused": True})
            return False
        send_message(connection, {"proof": prove(self.token, "server", mine, theirs)})
        return True

    def _answer(self, connection: socket.socket) -> None:
        request = receive_message(connection, self.max_message_bytes)
        try:
            answer = {"result": to_wire(self._call(request))}
        except DraftworksError as error:
            answer = _describe(error)
        except Exception as error:
            log.exception("a control-plane call failed")
            answer = _describe(StoreError(f"the control server failed: {type(error).__name__}: {error}"))
        try:
            send_message(connection, answer, self.max_message_bytes)
        except MessageTooLarge as error:
            send_message(connection, _describe(error))

    def _call(self, request: Any) -> Any:
        method = request.get("method") if isinstance(request, dict) else None
        if method not in CALLS:
            raise StoreError(f"the control server has no call {method!r}")
        arguments = from_wire(request.get("arguments"))
        if "now" in CALLS[method]:
            arguments["now"] = self.clock()
        return getattr(self.store, method)(**arguments)


def _describe(error: DraftworksError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)}


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], server: ControlServer) -> None:
        self.server = server
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a connection of the control server failed")


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        listener: Any = self.server
        listener.server.serve(self.request)
