"""How long a store whose service is away is waited for; a class stands for the connection, and a clock for time."""

from __future__ import annotations

from pathlib import Path

import pytest
from paused_time import PausedTime

from draftworks.errors import StoreError, StoreLostError
from draftworks.features import mooncake_store
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.mooncake.address import MooncakeAddress

ATTEMPT_S = 40.0
DEAD, ALIVE = (MooncakeAddress(f"127.0.0.1:{port}", "toys") for port in (1, 2))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PausedTime:
    clock = PausedTime()
    monkeypatch.setattr(mooncake_store, "time", clock)
    return clock


def connect_slowly(clock: PausedTime, file: Path, then: MooncakeAddress):
    """Return what stands for the connection: at the dead address an attempt takes long, and the file changes meanwhile."""

    class SlowClient:
        def __init__(self, address: MooncakeAddress) -> None:
            self.address = address
            if address == DEAD:
                clock.sleep(ATTEMPT_S)
                file.write_text(then.to_json())
                raise StoreError("no answer")

        def read_owner(self) -> None:
            pass

    return SlowClient


def test_an_attempt_longer_than_the_limit_is_followed_by_one_at_the_address_of_now(tmp_path, clock):
    file = tmp_path / "address.json"
    file.write_text(DEAD.to_json())
    connect = connect_slowly(clock, file, then=ALIVE)
    assert MooncakeFeatureStore(file, timeout_s=5, connect=connect).uri == ALIVE.uri


def test_a_service_that_stays_away_is_given_up_one_attempt_after_the_limit(tmp_path, clock):
    file = tmp_path / "address.json"
    file.write_text(DEAD.to_json())
    with pytest.raises(StoreLostError, match="was not started within 5 s: no answer"):
        MooncakeFeatureStore(file, timeout_s=5, connect=connect_slowly(clock, file, then=DEAD))
    assert ATTEMPT_S < clock.now < 3 * ATTEMPT_S
