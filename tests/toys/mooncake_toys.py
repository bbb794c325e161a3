"""A real Mooncake for tests: small, quick to notice deaths, over TCP between processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from waiting import HANG_S

from draftworks.mooncake.service import MooncakeOptions, MooncakeService

os.environ["MC_STORE_MEMCPY"] = "0"  # as between two machines

LEASE_TTL_S = 0.5
T = TypeVar("T")
SHORT_TTL_S = 2.0
"""For tests of an owner that is given up. A machine that is busy with other tests may stall a process for longer."""


def build_options(**changed: Any) -> MooncakeOptions:
    words = {"segment_bytes": 64 << 20, "store_id": "toys", "lease_ttl_s": LEASE_TTL_S}
    words |= {"timeout_s": HANG_S, "start_timeout_s": HANG_S}  # a death is told long before; a busy machine is no death
    return MooncakeOptions(**{**words, **changed})


def within_a_lease(act: Callable[[], T]) -> T:
    """Return what the first call of `act` gives that took no longer than Mooncake's lease: in a later one it has run out."""
    while True:
        began = time.monotonic()
        found = act()
        if time.monotonic() < began + LEASE_TTL_S:
            return found


@contextmanager
def running_mooncake(folder: Path, **changed: Any) -> Iterator[MooncakeService]:
    service = MooncakeService(build_options(**changed), folder)
    service.start()
    try:
        yield service
    finally:
        service.stop()
