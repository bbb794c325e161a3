"""`kill -9` of a run that a terminal started: all of its processes end, and the next run does not wait."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from processes import ending
from test_spec_assets_command_line import DAGSTER, ROOT
from waiting import wait_until


def start(site, home: Path, *command: str) -> subprocess.Popen:
    command = [str(DAGSTER), *command, "-f", str(site.module())]
    with (home / "err.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, "DAGSTER_HOME": str(home)}, cwd=ROOT, stderr=log)


def commands_of(home: Path) -> list[str]:
    """Command lines of all living processes that work for this Dagster home."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        mine = (process.info["environ"] or {}).get("DAGSTER_HOME") == str(home)
        if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.info["cmdline"] or []))
    return found


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_the_next_one_goes_on(site):
    site.write_chats(20)
    home = site.root / "dagster_home"
    home.mkdir()
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", home)
    entry, program = site.target_file.read_text(), "draftworks.programs.regenerate"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the program waits for an answer until it is killed
        endpoint = f"{{base_urls: ['http://127.0.0.1:{silent.getsockname()[1]}/v1'], server: sglang}}"
        site.target_file.write_text(entry.replace("responses: {", f"responses: {{endpoint: {endpoint}, "))
        run = start(site, home, "job", "execute", "-j", "prepare", "--tags", '{"dagster/partition": "small"}')
        with ending(run):
            wait_until(
                lambda: any(program in command for command in commands_of(home)), possible=lambda: run.poll() is None
            )
            run.kill()
            run.wait()

    wait_until(lambda: commands_of(home) == [], lambda: f"the end of {commands_of(home)}")
    site.target_file.write_text(entry)
    following = start(site, home, "asset", "materialize", "--select", "target_model,responses", "--partition", "small")
    with ending(following):
        assert following.wait() == 0
    assert "was killed: it is marked as failed" in (home / "err.log").read_text()
