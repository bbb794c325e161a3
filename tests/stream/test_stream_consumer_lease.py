"""One process per consumer identity."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from draftworks.errors import StoreError
from draftworks.stream.controller import DataFlowController
from draftworks.stream.leases import ConsumerLease, hold_consumer
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore

FORK = multiprocessing.get_context("fork")


def open_controller(path: Path, lease_s: float) -> DataFlowController:
    return DataFlowController("run", SQLiteMetadataStore(path), consumer_lease_s=lease_s)


def test_a_live_consumer_keeps_its_identity_and_the_next_one_follows_at_once(tmp_path: Path) -> None:
    first, second = (open_controller(tmp_path / "plane.db", 3.0) for _ in range(2))
    with hold_consumer(first) as lease:
        with pytest.raises(StoreError, match="is held by"), hold_consumer(second, wait_s=3.5):
            pass
        lease.require_held()
    with hold_consumer(second, wait_s=0.0) as lease:
        lease.require_held()


def _hold_for_ever(path: Path, ready: object) -> None:
    with hold_consumer(open_controller(path, 1.0)):
        ready.put(True)  # type: ignore[attr-defined]
        time.sleep(600)


def test_the_identity_of_a_killed_consumer_ends_by_itself(tmp_path: Path) -> None:
    ready = FORK.SimpleQueue()
    child = FORK.Process(target=_hold_for_ever, args=(tmp_path / "plane.db", ready))
    child.start()
    assert ready.get()
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with hold_consumer(open_controller(tmp_path / "plane.db", 1.0)) as lease:
        lease.require_held()


def require_until_lost(lease: ConsumerLease) -> None:
    while True:
        lease.require_held()
        time.sleep(0.05)


def test_a_consumer_learns_that_its_identity_went_to_another(tmp_path: Path) -> None:
    now = time.time
    first = open_controller(tmp_path / "plane.db", 0.4)
    thief = DataFlowController("run", SQLiteMetadataStore(tmp_path / "plane.db"), clock=lambda: now() + 3600)
    with hold_consumer(first) as lease:
        thief.hold_consumer()
        with pytest.raises(StoreError, match="consumer trainer of run run has lost its identity"):
            require_until_lost(lease)
