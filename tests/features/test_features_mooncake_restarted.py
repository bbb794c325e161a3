"""A store is opened where its service is now, also if the master of before dies just while it is opened."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from mooncake_toys import running_mooncake

from draftworks.errors import StoreLostError
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.mooncake.address import ADDRESS_FILE, MooncakeAddress
from draftworks.mooncake.client import MooncakeClient

pytestmark = pytest.mark.mooncake


_DIE = """
import os, socket, sys
content, file = sys.argv[1:]
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
server.accept()[0].close()
last = server.accept()[0]
if file:
    with open(file + ".new", "w") as new:
        new.write(content)
    os.replace(file + ".new", file)
server.close()
last.close()
"""
"""A process of its own: Mooncake holds Python's global lock while it tries, and no thread could close the port meanwhile."""


@contextmanager
def dying_master(file: Path | None = None, content: str = "") -> Iterator[MooncakeAddress]:
    """What listens, and is gone before its second connection ends; `content` is in `file` before that."""
    command = [sys.executable, "-c", _DIE, content, str(file or "")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield MooncakeAddress(f"127.0.0.1:{int(process.stdout.readline())}", "toys", timeout_s=2)
        finally:
            process.kill()


def test_a_master_that_dies_during_set_up_is_given_up_in_the_time_of_a_call():
    begin = time.monotonic()
    with dying_master() as address, pytest.raises(StoreLostError, match="is dead or unreachable"):
        MooncakeClient(address)
    assert time.monotonic() - begin < 30  # Mooncake's own attempts take 100 s, and hold Python's lock


def test_the_address_of_a_restarted_service_is_read_after_the_one_of_before_failed(tmp_path: Path):
    file = tmp_path / ADDRESS_FILE
    with running_mooncake(tmp_path / "service") as service:
        now = replace(service.address, timeout_s=10)
        with dying_master(file, now.to_json()) as address:
            file.write_text(address.to_json())
            # An attempt at the dead master takes longer than timeout_s.
            store = MooncakeFeatureStore(file, timeout_s=0.5, put_timeout_s=1)
        assert store.health()["losses"] == 0
        store.close()
