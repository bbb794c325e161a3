"""Features in object storage: reading in training order against obstore's own calls, and training against a disk.

    python benchmarks/object_storage.py s3://bucket/prefix --endpoint http://127.0.0.1:8333     # keys in AWS_ACCESS_KEY_ID, …
    python benchmarks/object_storage.py --server                # on a SeaweedFS that is started here

All sides read the same samples in the same shuffled order, with as many requests at a time, in turns; a share is the
median of the rounds' quotients. What is read is removed from the cache before each cold round.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import obstore
import torch
import typer
from obstore.store import S3Store
from random_training import write_random_training
from rich.console import Console
from rich.table import Table

from draftworks.config.features import BucketAccess, ObjectFeaturesSpec
from draftworks.config.run_files import StoreSpec, TrainRun
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.features.manifest import read_feature_set
from draftworks.features.object_feature_store import ObjectFeatureStore
from draftworks.features.object_shard import PlacedEntry
from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.storage.object_access import parse_object_url, read_settings

STREAMS = ("hf2", "hf18", "hf33", "last")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Place:
    """A place in object storage, and how many samples are read at a time."""

    url: str
    access: BucketAccess
    requests: int

    def describe(self, folder: Path, name: str, cache_gb: float = 0.0) -> StoreSpec:
        """Return a store below this place with notes and cache in `folder`."""
        objects = ObjectFeaturesSpec(
            url=f"{self.url}/{name}",
            access=self.access,
            cache=folder / "cache",
            cache_gb=cache_gb,
            requests=self.requests,
        )
        return StoreSpec(kind="s3", root=folder / "notes", objects=objects)


@dataclass
class Turns:
    """Seconds of each side, a figure for each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, side: str, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        self.seconds.setdefault(side, []).append(time.perf_counter() - began)

    def compare(self, side: str, other: str) -> float:
        """Return the median over the rounds of the time of `side` over that of `other`."""
        return statistics.median(one / two for one, two in zip(self.seconds[side], self.seconds[other], strict=True))


def make_samples(count: int, mib: float) -> Iterator[tuple[SampleRef, dict[str, torch.Tensor]]]:
    """Yield samples of four streams in bfloat16 of `mib` MiB together."""
    generator, width = torch.Generator().manual_seed(0), 1024
    length = max(1, round(mib * (1 << 20) / (len(STREAMS) * width * 2)))
    for index in range(count):
        keys = {stream: f"{index:08x}{number:024x}" for number, stream in enumerate(STREAMS)}
        tensors = {name: torch.randn(length, width, generator=generator).bfloat16() for name in STREAMS}
        yield SampleRef(f"s{index}", "benchmark", f"s{index}", "", keys, {}), tensors


def read_all(store: KeyedFeatureStore, refs: Sequence[SampleRef]) -> None:
    """Read samples as a loader does: announced some batches before, taken in order, released."""
    ahead = 64 if store.lookahead else 0
    store.expect(refs[:ahead])
    for index, ref in enumerate(refs):
        if ahead:
            store.expect(refs[index + ahead : index + ahead + 1])
        _, handle = store.get(ref)
        store.release(handle)


class BareClient:
    """obstore's `get_ranges` for the same ranges, with as many calls at a time."""

    def __init__(self, place: Place, name: str, store: ObjectFeatureStore, refs: Sequence[SampleRef]) -> None:
        found = parse_object_url(f"{place.url}/{name}")
        self._store = S3Store(
            found.bucket, client_options={"allow_http": True}, **read_settings(found.url, place.access)
        )
        self._requests = place.requests
        self._calls = []
        for ref in refs:
            holders = [store._index.shards.holders(key)[0] for key in ref.feature_keys.values()]
            entries = [holder.entries[key] for holder, key in zip(holders, ref.feature_keys.values(), strict=True)]
            placed = [entry for entry in entries if isinstance(entry, PlacedEntry)]
            path = f"{found.prefix}/shards/{holders[0].path.name}"
            self._calls.append((path, [e.start for e in placed], [e.start + e.nbytes for e in placed]))

    def read_all(self) -> None:
        with ThreadPoolExecutor(self._requests) as pool:
            for parts in pool.map(self._read, self._calls):
                assert parts

    def _read(self, call: tuple[str, list[int], list[int]]) -> list:
        path, starts, ends = call
        return obstore.get_ranges(self._store, path, starts=starts, ends=ends)


def compare_reading(place: Place, samples: int, mib: float, rounds: int, folder: Path) -> Turns:
    """Read samples bare, through the store without a cache, through an empty cache, and through a warm one."""
    name = f"reading-{os.getpid()}"
    cold, cached = place.describe(folder, name), place.describe(folder, name, cache_gb=100)
    writer = open_store(cold)
    refs = [writer.put(ref, tensors) for ref, tensors in make_samples(samples, mib)]
    writer.close()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1)).tolist()
    refs = [refs[index] for index in order]
    turns = Turns()
    plain = open_store(cold)
    assert isinstance(plain, ObjectFeatureStore)
    bare = BareClient(place, name, plain, refs)
    for number in range(rounds):
        sides: list[tuple[str, Callable[[], None]]] = [
            ("bare client", bare.read_all),
            ("store, no cache", lambda: read_all(plain, refs)),
        ]
        for side, work in sides if number % 2 else reversed(sides):
            turns.measure(side, work)
        shutil.rmtree(folder / "cache", ignore_errors=True)
        through = open_store(cached)
        turns.measure("store, empty cache", lambda through=through: read_all(through, refs))
        turns.measure("store, warm cache", lambda through=through: read_all(through, refs))
        through.close()
    plain.close()
    return turns


def compare_training(place: Place, samples: int, steps: int, rounds: int, folder: Path) -> Turns:
    """Train on samples of 1 MiB from a disk, from S3 without a cache, and from S3 with a warm one."""
    run = write_random_training(folder, steps, samples, range(510, 513))
    name = f"training-{os.getpid()}"
    stores = {
        "disk": run.store,
        "S3, no cache": place.describe(folder, name),
        "S3, warm cache": place.describe(folder, name, cache_gb=100),
    }
    source, target = open_store(run.store), open_store(stores["S3, no cache"])
    for features in (run.train, run.heldout):
        for ref in read_feature_set(features.features).refs:
            tensors, handle = source.get(ref)
            target.put(ref, tensors)
            source.release(handle)
    target.close()
    source.close()
    turns = Turns()
    for number in range(rounds + 1):
        for side, store in stores.items() if number % 2 else reversed(stores.items()):
            seconds = train_once(run, store, folder / f"out-{number}-{side}")
            if number:  # the first round warms the cache
                turns.seconds.setdefault(side, []).append(seconds)
    return turns


def train_once(run: TrainRun, store: StoreSpec, out: Path) -> float:
    """Train, and return the seconds of its steps."""
    out.mkdir()
    training = run.training.model_copy(update={"eval_every": 0, "save_every": 0, "processes": 1})
    changed = run.model_copy(update={"out": out, "store": store, "training": training})
    return train(changed, ProgramContext())["seconds"]


@contextmanager
def started_server(folder: Path) -> Iterator[Place]:
    """Start the tests' SeaweedFS."""
    sys.path.insert(0, str(ROOT / "tests" / "toys"))
    from s3_server import BUCKET, S3Server, set_keys  # pyright: ignore[reportMissingImports]

    set_keys(os.environ)
    server = S3Server(folder)
    server.start()
    try:
        yield Place(f"s3://{BUCKET}/benchmark", server.access(), 0)
    finally:
        server.kill()


def main(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix to write to; what is written stays.")] = "",
    endpoint: Annotated[str | None, typer.Option(help="Address of the server; default Amazon's.")] = None,
    server: Annotated[bool, typer.Option(help="Start a SeaweedFS here, and read from that.")] = False,
    samples: Annotated[int, typer.Option(help="Samples to read.")] = 128,
    mib: Annotated[float, typer.Option(help="Size of a sample.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Samples that are read at a time.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds of reading.")] = 7,
    trainings: Annotated[int, typer.Option(help="Rounds of training; 0: none.")] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a training, of 8 samples each.")] = 12,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")] = None,
) -> None:
    """Measure both and print the shares."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if server:
            with started_server(folder / "server") as place:
                found = run(Place(place.url, place.access, requests), samples, mib, rounds, trainings, steps, folder)
        else:
            place = Place(url, BucketAccess(endpoint=endpoint), requests)
            found = run(place, samples, mib, rounds, trainings, steps, folder)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2))


def run(
    place: Place, samples: int, mib: float, rounds: int, trainings: int, steps: int, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Measure, print and return the seconds of each side."""
    (folder / "reading").mkdir(parents=True)
    reading = compare_reading(place, samples, mib, rounds, folder / "reading")
    table = Table("reading", "MiB/s", "share of the bare client's speed")
    for side, seconds in reading.seconds.items():
        speed = samples * mib / statistics.median(seconds)
        table.add_row(side, f"{speed:.0f}", f"{reading.compare('bare client', side):.2f}")
    Console().print(table)
    if not trainings:
        return {"reading": reading.seconds}
    (folder / "training").mkdir()
    training = compare_training(place, 48, steps, trainings, folder / "training")
    table = Table("training from", "median s", "times that from a disk")
    for side, seconds in training.seconds.items():
        table.add_row(side, f"{statistics.median(seconds):.2f}", f"{training.compare(side, 'disk'):.2f}")
    Console().print(table)
    return {"reading": reading.seconds, "training": training.seconds}


if __name__ == "__main__":
    typer.run(main)
