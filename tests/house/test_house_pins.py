"""Versions that are said in several places are the same in all of them.
Ports of tests: nobody else gets one that is reserved, and the system gives none of them to a connection.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from ports import FIRST, LAST, reserve_port, reserve_ports

ROOT = Path(__file__).resolve().parents[2]


def pinned() -> dict[str, str]:
    """Versions of constraints.txt by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}


def test_hooks_use_the_linter_that_is_pinned():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    wanted = {each for repo in config["repos"] for hook in repo["hooks"] for each in hook["additional_dependencies"]}
    assert all("==" in each for each in wanted)
    assert [each for each in wanted if each.startswith("ruff==")] == [f"ruff=={pinned()['ruff']}"]


def test_every_tool_of_an_extra_is_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {each.split(">=")[0].split("[")[0].lower() for extra in extras.values() for each in extra}
    assert names <= pinned().keys()


def test_environments_that_have_the_torch_of_venv_ask_for_that_torch():
    """pip would install another one into them, see tools/link_torch.py."""
    for name in ("sglang", "speculators", "specforge"):
        lines = (ROOT / "tools" / f"{name}-requirements.txt").read_text().splitlines()
        assert f"torch=={pinned()['torch']}" in lines, name


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
