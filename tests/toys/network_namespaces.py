"""Two hosts on one machine: network namespaces that are joined by one cable. Needs root."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Where a process runs.

    Attributes:
        prefix: what stands before a command that is to run there.
        address: where others reach it.
    """

    prefix: tuple[str, ...]
    address: str


LOOPBACK = Host((), "127.0.0.1")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Raises RuntimeError if this user cannot make namespaces."""
    name = uuid.uuid4().hex[:6]
    names = [f"dw{name}{side}" for side in "ab"]
    hosts = [Host(("ip", "netns", "exec", each), f"10.213.77.{number}") for number, each in enumerate(names, start=1)]
    try:
        for each in names:
            _run("ip", "netns", "add", each)
        _run("ip", "link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
        for each, host in zip(names, hosts):
            _run("ip", "-n", each, "addr", "add", f"{host.address}/24", "dev", each)
            _run("ip", "-n", each, "link", "set", each, "up")
            _run("ip", "-n", each, "link", "set", "lo", "up")  # a host reaches its own address by it
        yield hosts[0], hosts[1]
    finally:
        for each in names:
            if os.path.exists(f"/run/netns/{each}"):
                subprocess.run(["ip", "netns", "del", each], check=False)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(str(error)) from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
