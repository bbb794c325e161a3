"""Ports for servers that must be told one: held by this process to its end, and never given to a connection by the system."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

FIRST, LAST = 12000, 30000
"""Below those that Linux gives to connections (net.ipv4.ip_local_port_range)."""


def reserve_port() -> int:
    """Return a free port that no other process gets by this function before this one has ended."""
    folder = Path(tempfile.gettempdir()) / f"draftworks-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    start = random.SystemRandom().randrange(FIRST, LAST)
    for port in itertools.chain(range(start, LAST), range(FIRST, start)):
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            return port  # the descriptor stays open, and with it the lock
        os.close(lock)
    raise OSError(f"no free port from {FIRST} to {LAST}")


def reserve_ports(count: int) -> list[int]:
    """Return so many different ports."""
    return [reserve_port() for _ in range(count)]
