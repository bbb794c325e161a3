"""A network between a server and its clients that cuts every connection, in the middle of what is on the way."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from threading import Thread, Timer


class CuttingProxy:
    """Forwards connections to `server` (`host:port`), and cuts each 0.1 to 1.5 s after it was made."""

    def __init__(self, server: str, rng: random.Random) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._rng = rng
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0

    def __enter__(self) -> CuttingProxy:
        Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._server)
                except OSError:
                    client.close()
                    continue
                for ends in ((client, server), (server, client)):
                    Thread(target=_pump, args=ends, daemon=True).start()
                timer = Timer(self._rng.uniform(0.1, 1.5), self._cut, (client, server))
                timer.daemon = True
                timer.start()

    def _cut(self, *ends: socket.socket) -> None:
        self.cuts += 1
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        end.close()
