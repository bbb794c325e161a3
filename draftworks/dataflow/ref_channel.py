"""A folder through which one writer streams references to one consumer in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftworks.dataflow.channel_reader import RefReader
from draftworks.dataflow.channel_writer import RefWriter
from draftworks.dataflow.ref_lines import RefCodec, SlimRefs

IDLE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class StreamingRefChannel:
    """An append-only file of references with one writer and one consumer, each a process that may die and come again.

    A consumer that comes again reads from the first line on and drops what it has trained (`skip_ids` of
    `StreamingRefQueue`). A writer that comes again appends; what its predecessor had published is not published twice.

    Attributes:
        folder: on a disk of this machine, or shared by both machines.
        codec: the form of the lines; both sides name the same.
        idle_timeout_s: the longest that one side waits while nothing comes from the other; then it raises StoreError.
        session: identifies one start of both sides. A side that failed in another session is taken for one that has not
            come yet. Where it is always "", a failed side has to come again before the other one.
        clock: of the consumer's waits.
    """

    folder: Path
    codec: RefCodec = SlimRefs()
    idle_timeout_s: float = IDLE_TIMEOUT_S
    session: str = ""
    clock: Callable[[], float] = time.monotonic

    def open_writer(self) -> RefWriter:
        """Take the writer's side. Raises StoreError as `RefWriter`."""
        return RefWriter(self.folder, self.codec, self.idle_timeout_s, self.session)

    def open_consumer(self) -> RefReader:
        """Take the consumer's side. Raises StoreError as `RefReader`."""
        return RefReader(self.folder, self.codec, self.idle_timeout_s, self.session, self.clock)
