"""Writing and reading stored features beside a plain write and a copy of the same bytes, in turns.

    python benchmarks/feature_io.py                             # 16 samples of 4 streams of 1,024 x 4,096 in bfloat16
    python benchmarks/feature_io.py --before ../other-checkout  # and the code of another checkout, turn by turn

Every turn is a process with one thread of torch. It writes the bytes into a plain file, with an fsync and a rename; puts
the samples into a new local store; opens the store again and copies every feature out of it, first with its checksum
compared, then without; and copies the same bytes in memory, with XXH3 of 128 bits and without. Files are in the page cache
when they are read.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from figures import Aim, format_table, print_aims, summarize

STREAMS = ("hf2", "hf18", "hf33", "last")
TIMES = ("plain write", "store write", "copy + hash", "first read", "copy", "later read")


def main(
    turns: Annotated[int, typer.Option(help="Processes of each checkout.")] = 5,
    samples: Annotated[int, typer.Option(help="Samples of 32 MiB with the default sizes.")] = 16,
    tokens: int = 1024,
    hidden: int = 4096,
    folder: Annotated[
        Path | None, typer.Option(help="Where the files lie; default the folder for temporary ones.")
    ] = None,
    before: Annotated[Path | None, typer.Option(help="Another checkout to run in turns with this one.")] = None,
    one: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print medians over the turns: GB per second of processor time and of wall time, and the ratios within turns."""
    if one:
        print(json.dumps(measure(samples, tokens, hidden, folder)))
        return
    checkouts = {"this": Path(__file__).parents[1]} | ({} if before is None else {"before": before.resolve()})
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            sizes = ["--samples", str(samples), "--tokens", str(tokens), "--hidden", str(hidden)]
            place = [] if folder is None else ["--folder", str(folder)]
            done = subprocess.run(
                [sys.executable, __file__, "--one", *sizes, *place],
                env={**os.environ, "PYTHONPATH": str(checkout)},
                check=True,
                text=True,
                stdout=subprocess.PIPE,
            )
            found[name].append(json.loads(done.stdout))
    for name, turns_of in found.items():
        print(format_turns(name, turns_of), end="\n\n")
    print_aims(list_aims(found["this"]))


def measure(samples: int, tokens: int, hidden: int, folder: Path | None) -> dict[str, list[float]]:
    """Return the processor and the wall time of each of `TIMES`, in GB per second."""
    import torch
    import xxhash

    from draftworks.features.contracts import SampleRef
    from draftworks.features.local_store import LocalFeatureStore

    torch.set_num_threads(1)
    data = [
        {name: torch.randint(-9, 9, (tokens, hidden), dtype=torch.int16).view(torch.bfloat16) for name in STREAMS}
        for _ in range(samples)
    ]
    flat = [each.view(torch.uint8).numpy().data.cast("B") for sample in data for each in sample.values()]
    buffer = torch.empty_like(data[0]["last"])
    buffer.zero_()
    size = sum(map(len, flat)) / 1e9
    refs = [
        SampleRef(f"s{index}", "r", "t", "", {name: f"{index:028x}{at:04x}" for at, name in enumerate(STREAMS)}, {})
        for index in range(samples)
    ]

    def timed(action: Callable[[], None]) -> list[float]:
        cpu, wall = time.process_time(), time.perf_counter()
        action()
        return [size / (time.process_time() - cpu), size / (time.perf_counter() - wall)]

    def copy(check: bool) -> None:
        for sample in data:
            for each in sample.values():
                if check:
                    xxhash.xxh3_128(each.view(torch.uint8).numpy().data).digest()
                buffer.copy_(each)

    with tempfile.TemporaryDirectory(dir=folder) as place:

        def write_plainly() -> None:
            staging = Path(place, "plain.tmp")
            with staging.open("wb") as stream:
                for part in flat:
                    stream.write(part)
                stream.flush()
                os.fsync(stream.fileno())
            staging.rename(Path(place, "plain"))

        def write_store() -> None:
            with_copies = LocalFeatureStore(Path(place, "store"), keep_tensors=True)
            for ref, sample in zip(refs, data):
                with_copies.put(ref, sample)
            with_copies.flush()

        def read(store: LocalFeatureStore) -> None:
            for ref in refs:
                tensors, handle = store.get(ref)
                for each in tensors.values():
                    buffer.copy_(each)
                store.release(handle)

        times = {"plain write": timed(write_plainly), "store write": timed(write_store)}
        store = LocalFeatureStore(Path(place, "store"))
        times["copy + hash"] = timed(lambda: copy(True))
        times["first read"] = timed(lambda: read(store))
        times["copy"] = timed(lambda: copy(False))
        times["later read"] = timed(lambda: read(store))
        return times


def format_turns(name: str, turns: list[dict[str, list[float]]]) -> str:
    """Return a table of medians with the least and the largest of the turns, and the share of each baseline."""
    rows = []
    for at, action in enumerate(TIMES):
        cells = [summarize([turn[action][kind] for turn in turns], 2) for kind in (0, 1)]
        shares = ["", ""]
        if at % 2:
            baseline = TIMES[at - 1]
            shares = [summarize([turn[action][kind] / turn[baseline][kind] for turn in turns], 2) for kind in (0, 1)]
        rows.append([action, *cells, *shares])
    return format_table((f"{name} code, GB/s", "processor", "wall", "share, processor", "share, wall"), rows)


def list_aims(turns: list[dict[str, list[float]]]) -> list[Aim]:
    """Return the aims by processor time; of a read either its speed counts or its share, whichever is nearer."""

    def rate(action: str) -> float:
        return statistics.median(turn[action][0] for turn in turns)

    def share(action: str, baseline: str) -> float:
        return statistics.median(turn[action][0] / turn[baseline][0] for turn in turns)

    def read(action: str, baseline: str, fast: float) -> Aim:
        if rate(action) >= fast:
            return Aim(f"GB per CPU second of a {action}", rate(action), fast)
        return Aim(f"a {action}, share of {baseline}", share(action, baseline), 0.8)

    write = Aim("a store write, share of a plain write", share("store write", "plain write"), 0.7)
    return [write, read("first read", "copy + hash", 4), read("later read", "copy", 8)]


if __name__ == "__main__":
    typer.run(main)
