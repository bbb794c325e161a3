"""What the control plane costs: references committed, published, consumed and acknowledged through SQLite.

    python benchmarks/control_plane.py                   # 1,000,000 references
    python benchmarks/control_plane.py --count 100000 --json OUT.json

A process of its own goes through the life of a training set: tasks are added, leased, and committed with their references
in batches; a consumer reads the references by cursor and acknowledges every optimizer step in one transaction; a last restart
reconciles. Each row has the seconds since the row before, and the largest resident memory until then: memory that grows
with the number of references would show between the rows of one phase. "slim" compares the slim form of a reference with
`SampleRef.to_json`, as CPU time per reference (medians).
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from draftworks.features.contracts import FeatureSpec, SampleRef
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import PromptTask
from draftworks.stream.ref_set import RefEncoder, decode_ref
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore

STREAMS = ("hf3", "hf15", "hf28", "last")
HIDDEN = 4096
SAMPLES_PER_TASK = 64
POINTS = 5
"""Rows of every phase."""


@dataclass(frozen=True)
class Row:
    """One point of a phase.

    Attributes:
        refs: references that have passed the phase.
        seconds: since the row before.
        cpu_seconds: of this process since the row before; on a busy machine, the cost that is not the others'.
        peak_mib: largest resident memory so far.
    """

    phase: str
    refs: int
    seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass
class Timeline:
    """Collects rows; prints each as it comes."""

    rows: list[Row] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)
    cpu_since: float = field(default_factory=time.process_time)

    def mark(self, phase: str, refs: int) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        row = Row(phase, refs, now - self.since, cpu - self.cpu_since, peak)
        self.rows.append(row)
        self.since, self.cpu_since = now, cpu
        times = f"{row.seconds:>9.2f} {row.cpu_seconds:>9.2f}"
        print(f"{row.phase:<12} {row.refs:>10,} {times} {row.peak_mib:>9.1f}", flush=True)


@dataclass(frozen=True)
class SlimCost:
    """CPU microseconds per reference, and bytes of one."""

    to_json_us: float
    encode_us: float
    from_json_us: float
    decode_us: float
    json_bytes: int
    slim_bytes: int


def main(
    count: Annotated[int, typer.Option(help="References.")] = 1_000_000,
    batch: Annotated[int, typer.Option(help="References of one commit and of one page.")] = 1024,
    step: Annotated[int, typer.Option(help="Samples of an optimizer step, acknowledged in one transaction.")] = 256,
    folder: Annotated[Path | None, typer.Option(help="A folder on a local disk; by default a temporary one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here too.")] = None,
) -> None:
    """Measure the control plane."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "plane.db"
        print(f"{'phase':<12} {'references':>10} {'seconds':>9} {'CPU s':>9} {'peak MiB':>9}")
        rows = measure_life(path, count, batch, step)
        size = path.stat().st_size
    total, cpu = sum(row.seconds for row in rows), sum(row.cpu_seconds for row in rows)
    each = f"{1e6 * total / count:.0f} us a reference ({1e6 * cpu / count:.0f} us of CPU)"
    print(f"total {total:.1f} s ({cpu:.1f} s of CPU), {each}; database {size / 2**20:.0f} MiB")
    slim = measure_slim()
    print(
        f"slim: encode {slim.encode_us:.1f} us ({slim.to_json_us / slim.encode_us:.0f} x less than to_json, "
        f"{slim.to_json_us:.0f} us), decode {slim.decode_us:.1f} us (from_json {slim.from_json_us:.1f} us), "
        f"{slim.slim_bytes} bytes ({slim.json_bytes})"
    )
    if json_file is not None:
        found = {"count": count, "batch": batch, "step": step, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps({**found, "database_bytes": size, "slim": asdict(slim)}, indent=1) + "\n")


def measure_life(path: Path, count: int, batch: int, step: int) -> list[Row]:
    """Run `count` references through a database, from tasks to a restart; return the rows."""
    controller = DataFlowController("run", SQLiteMetadataStore(path), lease_s=3600.0)
    timeline = Timeline()
    timeline.mark("start", 0)
    for first, upto in _slices(count, batch):
        controller.add_tasks([make_task(n, upto) for n in range(first, upto, SAMPLES_PER_TASK)])
    timeline.mark("tasks", count)
    _commit_all(controller, timeline, count, batch)
    _consume_all(controller, timeline, count, batch, step)
    controller.record_checkpoint(-(-count // step))
    waiting = controller.read_refs(acked=False)
    assert not waiting.refs
    assert sum(1 for _ in controller.iterate_refs(acked=True)) == count
    timeline.mark("restart", count)
    controller.close()
    return timeline.rows


def make_task(first: int, upto: int) -> PromptTask:
    """Return the task of up to `SAMPLES_PER_TASK` samples from number `first` on."""
    last = min(first + SAMPLES_PER_TASK, upto)
    return PromptTask(f"task-{first:08d}", "run", tuple(f"train-{n:08d}" for n in range(first, last)), step=first)


def make_ref(number: int, task_id: str) -> SampleRef:
    """Return a reference as EAGLE-3's features of an 8B target have it."""
    tokens = 64 + number * 7919 % 4000
    return SampleRef(
        f"train-{number:08d}",
        "run",
        task_id,
        "mooncake://store",
        {name: f"{number:060x}{place:04x}" for place, name in enumerate(STREAMS)},
        {name: FeatureSpec(name, (tokens, HIDDEN), "bfloat16") for name in STREAMS},
        strategy="eagle3",
        num_tokens=tokens,
        estimated_bytes=2 * tokens * HIDDEN * len(STREAMS),
    )


def _commit_all(controller: DataFlowController, timeline: Timeline, count: int, batch: int) -> None:
    done = 0
    with _points(timeline, "commit", count) as passed:
        while leases := controller.lease_tasks("producer", max(1, batch // SAMPLES_PER_TASK)):
            refs = [make_ref(int(each[6:]), lease.task.task_id) for lease in leases for each in lease.task.sample_ids]
            done += len(controller.commit_samples(refs, leases).committed)
            passed(done)
    assert done == count


def _consume_all(controller: DataFlowController, timeline: Timeline, count: int, batch: int, step: int) -> None:
    """Read every reference in commit order, and acknowledge `step` samples at a time."""
    cursor, done, waiting = 0, 0, []
    with _points(timeline, "read, ack", count) as passed:
        while True:
            page = controller.read_refs(cursor, batch)
            cursor = page.cursor
            waiting += [ref.sample_id for ref in page.refs]
            while len(waiting) >= step or (waiting and not page.refs):
                controller.ack(waiting[:step], done // step + 1)
                done += len(waiting[:step])
                del waiting[:step]
            passed(done)
            if not page.refs:
                break
    assert done == count


@contextmanager
def _points(timeline: Timeline, phase: str, count: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that marks every `1 / POINTS` of the references that have passed."""
    marked = 0

    def passed(done: int) -> None:
        nonlocal marked
        if done * POINTS // count > marked:
            marked = done * POINTS // count
            timeline.mark(phase, done)

    yield passed


def _slices(count: int, batch: int) -> Iterator[tuple[int, int]]:
    size = max(1, batch // SAMPLES_PER_TASK) * SAMPLES_PER_TASK
    return ((first, min(first + size, count)) for first in range(0, count, size))


def measure_slim(count: int = 1000, repeats: int = 5) -> SlimCost:
    """Compare the slim form of a reference with its JSON, in turns."""
    refs = [make_ref(number, f"task-{number // SAMPLES_PER_TASK:08d}") for number in range(count)]
    encoder = RefEncoder()
    slim, texts = [encoder.encode(ref) for ref in refs], [ref.to_json() for ref in refs]
    works: list[Callable[[], Sequence[object]]] = [
        lambda: [ref.to_json() for ref in refs],
        lambda: [encoder.encode(ref) for ref in refs],
        lambda: [SampleRef.from_json(text) for text in texts],
        lambda: [decode_ref(each.header, each.line) for each in slim],
    ]
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, taken in zip(works, seconds):
            began = time.process_time()
            work()
            taken.append((time.process_time() - began) / count * 1e6)
    to_json, encode, from_json, decode = map(statistics.median, seconds)
    return SlimCost(to_json, encode, from_json, decode, len(texts[-1]), len(slim[-1].line))


if __name__ == "__main__":
    typer.run(main)
