"""`python -m draftworks.programs.memory FILE`: keep the memory of a stream's Mooncake store until it is ended."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NoReturn

from draftworks.config.run_files import MemoryRun
from draftworks.errors import StoreLostError
from draftworks.features.manifest import read_feature_set
from draftworks.mooncake.service import MIN_SEGMENT_BYTES, MooncakeOptions, MooncakeService
from draftworks.programs.program import ProgramContext, run_program
from draftworks.stream.stream_rounds import make_streaming_plan

HEAD_ROOM = 1.25
"""Of the segment over the bytes of the features: Mooncake rounds each object up, and holes come between them."""
LEASE_TTL_S = 60.0
"""Longer than a sample takes to be read. It delays no free: the stream's consumer removes what nobody reads by force."""
_START_ATTEMPTS = 3
_PAUSE_S = 2.0
log = logging.getLogger(__name__)


def serve_memory(run: MemoryRun, ctx: ProgramContext) -> dict[str, Any]:
    """Run Mooncake's master and the owner of its memory; start both again, empty, whenever one dies.

    Raises:
        ConfigError: Mooncake is not installed.
        StoreLostError: they cannot be started; the message has the end of the log.
    """
    plan = make_streaming_plan(read_feature_set(run.features).refs, run.streams, run.steps, run.stream)
    options = MooncakeOptions(
        find_segment_bytes(plan.peak_bytes), host=run.stream.settings.store.host, lease_ttl_s=LEASE_TTL_S
    )
    ctx.log(
        f"a Mooncake store of {options.segment_bytes / 1e9:.3f} GB; logs and address are in {run.stream.store.root}"
    )
    _keep_running(options, run, ctx)


def find_segment_bytes(peak_bytes: int) -> int:
    """Return the memory for features of at most `peak_bytes` at a time."""
    return int(peak_bytes * HEAD_ROOM) + 4 * MIN_SEGMENT_BYTES


def _keep_running(options: MooncakeOptions, run: MemoryRun, ctx: ProgramContext) -> NoReturn:
    failures = 0
    while True:
        lost = threading.Event()
        try:
            with MooncakeService(options, run.stream.store.root, lambda reason, lost=lost: lost.set()) as service:
                ctx.log(f"the Mooncake store runs at {service.address.master}")
                failures = 0
                lost.wait()
                ctx.log(f"{service.find_problem()}\nThe store is started again, and is empty")
        except StoreLostError:
            failures += 1
            if failures == _START_ATTEMPTS:
                raise
            log.exception("the Mooncake store could not be started")
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    run_program(MemoryRun, serve_memory)
