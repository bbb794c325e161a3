"""A store is opened where its service is now, also if the master of before dies just while it is opened."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mooncake_toys import running_mooncake

from draftworks.errors import StoreLostError
from draftworks.features.restarted_mooncake import RestartedMooncakeStore
from draftworks.mooncake.address import ADDRESS_FILE, MooncakeAddress
from draftworks.mooncake.client import MooncakeClient

pytestmark = pytest.mark.mooncake


class DyingMaster:
    """Listens, closes each of some connections, and then is gone; `on_death` is called before."""

    def __init__(self, connections: int, on_death=lambda: None) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = MooncakeAddress(f"127.0.0.1:{self._server.getsockname()[1]}", "toys", timeout_s=2)
        threading.Thread(target=self._die, args=(connections, on_death), daemon=True).start()

    def _die(self, connections: int, on_death) -> None:
        for _ in range(connections):
            self._server.accept()[0].close()
        on_death()
        self._server.close()


def test_a_master_that_dies_during_set_up_is_given_up_in_the_time_of_a_call():
    begin = time.monotonic()
    with pytest.raises(StoreLostError, match="is dead or unreachable"):
        MooncakeClient(DyingMaster(connections=2).address)
    assert time.monotonic() - begin < 90  # Mooncake's own attempts take 100 s, and hold Python's lock


def test_the_address_of_a_restarted_service_is_read_after_the_one_of_before_failed(tmp_path: Path):
    file = tmp_path / ADDRESS_FILE
    with running_mooncake(tmp_path / "service") as service:
        now = replace(service.address, timeout_s=10)
        master = DyingMaster(connections=2, on_death=lambda: file.write_text(now.to_json()))
        file.write_text(master.address.to_json())
        # An attempt at the dead master takes longer than timeout_s.
        store = RestartedMooncakeStore(file, timeout_s=0.5, put_timeout_s=1)
        assert store.health()["losses"] == 0
        store.close()
