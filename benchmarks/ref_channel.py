"""References through a channel between two processes: seconds, and whether their memory grows.

    python benchmarks/ref_channel.py                     # 100,000 references of four streams
    python benchmarks/ref_channel.py --refs 1000000

The producer publishes batches behind a watermark; the consumer takes batches of as many through a queue and acknowledges
each. Memory is the resident size of each process after a tenth of the references, and at its end.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Annotated

import psutil
import typer

from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import StreamingRefQueue
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.features.contracts import FeatureSpec, SampleRef

STREAMS = ("hf2", "hf18", "hf33", "last")


@dataclass(frozen=True)
class SideResult:
    """Seconds of processor time of one side, and its resident bytes early and late."""

    name: str
    cpu_seconds: float
    early_bytes: int
    late_bytes: int


def main(
    refs: Annotated[int, typer.Option(help="How many references travel.")] = 100_000,
    batch: Annotated[int, typer.Option(help="References of one batch.")] = 64,
    watermark: Annotated[int, typer.Option(help="Samples in flight.")] = 4096,
) -> None:
    """Print the seconds and the memory of both sides."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        found: SimpleQueue[SideResult] = processes.SimpleQueue()
        started = time.monotonic()
        sides = [
            processes.Process(target=target, args=(Path(folder), refs, batch, watermark, found))
            for target in (produce, consume)
        ]
        for side in sides:
            side.start()
        for side in sides:
            side.join()
            if side.exitcode:
                raise SystemExit(f"a side failed with exit code {side.exitcode}")
        seconds = time.monotonic() - started
        size = (Path(folder) / "refs.jsonl").stat().st_size
    print(f"{refs:,} references in {seconds:.1f} s ({refs / seconds:,.0f}/s), {size / refs:.0f} bytes each")
    for result in sorted((found.get() for _ in sides), key=lambda each: each.name):
        early, late = result.early_bytes / 1e6, result.late_bytes / 1e6
        print(f"{result.name}: {result.cpu_seconds:.1f} s of processor, {early:.0f} MB early, {late:.0f} MB at the end")


def produce(folder: Path, count: int, size: int, watermark: int, found: SimpleQueue[SideResult]) -> None:
    """Publish batches as there is room."""
    meter, limit = _Meter("producer", count), Watermark(samples=watermark)
    with StreamingRefChannel(folder).open_writer() as writer:
        for batch in make_batches(count, size):
            if not writer.wait_for_room(limit, InFlight.of(batch)):
                break
            meter.add(writer.publish_batch(batch))
    found.put(meter.result())


def consume(folder: Path, count: int, size: int, _: int, found: SimpleQueue[SideResult]) -> None:
    """Take and acknowledge all."""
    meter = _Meter("consumer", count)
    queue = StreamingRefQueue(StreamingRefChannel(folder).open_consumer())
    while refs := queue.get(size):
        queue.ack(ref.sample_id for ref in refs)
        meter.add(len(refs))
    queue.close()
    found.put(meter.result())


def make_batches(count: int, size: int) -> Iterator[list[SampleRef]]:
    """Yield references as a capture of an 8B target makes them."""
    for start in range(0, count, size):
        yield [make_ref(number) for number in range(start, min(start + size, count))]


def make_ref(number: int) -> SampleRef:
    length = 200 + number % 1000
    specs = {name: FeatureSpec(name, (length, 4096), "bfloat16") for name in STREAMS}
    keys = {name: f"{number:030x}{index:02x}" for index, name in enumerate(STREAMS)}
    size = sum(spec.nbytes for spec in specs.values())
    return SampleRef(
        f"run:{number:08d}",
        "run",
        f"t{number // 16}",
        "shared://s",
        keys,
        specs,
        num_tokens=length,
        estimated_bytes=size,
    )


class _Meter:
    """Memory of this process after a tenth of the references, and at the end."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._early_at = count // 10
        self._done = 0
        self._early = 0

    def add(self, done: int) -> None:
        self._done += done
        if not self._early and self._done >= self._early_at:
            self._early = psutil.Process().memory_info().rss

    def result(self) -> SideResult:
        return SideResult(self._name, time.process_time(), self._early, psutil.Process().memory_info().rss)


if __name__ == "__main__":
    typer.run(main)
