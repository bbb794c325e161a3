"""An HTTP server on a free port that answers JSON with JSON, for stand-ins of serving engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    path: str
    headers: Mapping[str, str]
    body: Any


class Reply(NamedTuple):
    """`status` 0 closes the connection; a `value` that is a text is sent as it is."""

    status: int
    value: Any


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that stopped waiting is part of the test."""


@contextmanager
def json_server(answer: Callable[[Request], Reply]) -> Iterator[str]:
    """Serve POST requests by `answer`, each in a thread of its own; yields the address."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = answer(Request(self.path, dict(self.headers), body))
            if reply.status == 0:
                return
            content = (reply.value if isinstance(reply.value, str) else json.dumps(reply.value)).encode()
            self.reply(reply.status, content)

    with serve(Handler) as url:
        yield url


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """A test's output is its own."""

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve requests on a free port of this machine, each in a thread of its own; yields the address."""
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
