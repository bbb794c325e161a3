"""Exact peak of the memory held in tensors: what torch's allocators hand out, not the memory of the process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class _Event(NamedTuple):
    """Bytes allocated (negative: freed) at an address, at a moment."""

    moment: float
    address: int
    bytes: int


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at once during `work()` on the CPU, beyond what was there before it.

    Scratch memory within kernels counts, if torch's allocator gave it. What `work` returns is kept to its end.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    del kept
    held: dict[int, int] = {}
    total = peak = 0
    for event in sorted(_memory_events(profiler)):
        if event.bytes > 0:
            held[event.address] = event.bytes
            total += event.bytes
            peak = max(peak, total)
        else:
            total -= held.pop(event.address, 0)
    return peak


def _memory_events(profiler: profile) -> Iterator[_Event]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    for event in events:
        if event["name"] == "[memory]":
            yield _Event(event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
