"""A real Mooncake for tests: small, quick to notice deaths, over TCP between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftworks.mooncake.service import MooncakeOptions, MooncakeService

os.environ["MC_STORE_MEMCPY"] = "0"  # as between two machines

LEASE_TTL_S = 0.5
TIMEOUT_S = 8.0
"""Beyond the 4.3 s after which Mooncake says that a dead master is."""
SHORT_TTL_S = 2.0
"""For tests of an owner that is given up. A machine that is busy with other tests may stall a process for longer."""


def build_options(**changed: Any) -> MooncakeOptions:
    words = {"segment_bytes": 64 << 20, "store_id": "toys", "lease_ttl_s": LEASE_TTL_S, "timeout_s": TIMEOUT_S}
    return MooncakeOptions(**{**words, **changed})


@contextmanager
def running_mooncake(folder: Path, **changed: Any) -> Iterator[MooncakeService]:
    service = MooncakeService(build_options(**changed), folder)
    service.start()
    try:
        yield service
    finally:
        service.stop()
