"""Ports of tests: nobody else gets one that is reserved, and the system gives none of them to a connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ports import FIRST, LAST, reserve_port, reserve_ports

TOYS = Path(__file__).resolve().parents[1] / "toys"


def test_two_are_never_the_same_and_can_be_listened_on():
    ports = reserve_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_another_process_does_not_get_it_before_this_one_has_ended(monkeypatch: pytest.MonkeyPatch):
    program = "import random, ports\nrandom.SystemRandom.randrange = lambda *_: {}\nprint(ports.reserve_port())"
    mine = reserve_port()

    def ask_elsewhere() -> int:
        command = [sys.executable, "-c", program.format(mine)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TOYS)}, capture_output=True, check=True)
        return int(done.stdout)

    assert ask_elsewhere() != mine
    theirs = ask_elsewhere()
    monkeypatch.setattr("random.SystemRandom.randrange", lambda *_: theirs)
    assert reserve_port() == theirs, "free again, since that process has ended"


def test_one_that_is_listened_on_is_left_out(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("ports.FIRST", taken.getsockname()[1])
        monkeypatch.setattr("ports.LAST", taken.getsockname()[1] + 1)
        with pytest.raises(OSError, match="no free port"):
            reserve_port()


@pytest.mark.skipif(sys.platform != "linux", reason="the range is told in Linux's /proc")
def test_the_system_gives_none_of_them_to_a_connection():
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if lowest < LAST:
        pytest.skip(f"this machine gives the ports {lowest} to {highest} to connections")
    assert FIRST < LAST <= lowest
