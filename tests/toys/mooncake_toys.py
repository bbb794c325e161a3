"""A real Mooncake for tests: small, quick to notice deaths, over TCP between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftworks.mooncake.service import MooncakeOptions, MooncakeService

os.environ["MC_STORE_MEMCPY"] = "0"  # as between two machines

LEASE_TTL_S = 0.5
TIMEOUT_S = 8.0
"""Beyond the 4.3 s after which Mooncake says that a dead master is."""


def build_options(segment_bytes: int = 64 << 20, lease_ttl_s: float = LEASE_TTL_S) -> MooncakeOptions:
    return MooncakeOptions(
        segment_bytes, store_id="toys", lease_ttl_s=lease_ttl_s, client_ttl_s=2.0, timeout_s=TIMEOUT_S
    )


@contextmanager
def running_mooncake(
    folder: Path, segment_bytes: int = 64 << 20, lease_ttl_s: float = LEASE_TTL_S
) -> Iterator[MooncakeService]:
    service = MooncakeService(build_options(segment_bytes, lease_ttl_s), folder)
    service.start()
    try:
        yield service
    finally:
        service.stop()
