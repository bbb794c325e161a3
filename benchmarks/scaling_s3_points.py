"""Paced trainings on features in S3-compatible storage against the simulation of benchmarks/scaling_model.py.

    AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \\
        python benchmarks/scaling_s3_points.py --endpoint http://127.0.0.1:8333 --url s3://bucket/scaling

Reading is that of the feature store, one sample after another or ahead of its use; a step is a pause. What a batch costs to
read is measured apart, in the same turn, by readers that do not pause. Nothing is cached on a disk.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import torch
import typer
from scaling_model import Plant, simulate

from draftworks.config.features import BucketAccess, ObjectFeaturesSpec
from draftworks.config.run_files import StoreSpec
from draftworks.features.contracts import FeatureSpec, KeyedFeatureStore, SampleRef
from draftworks.features.open_store import open_store

BATCH, BATCHES, AHEAD_STEPS = 4, 24, 8
SHAPE = (256, 2048)
"""Of a sample's one tensor in fp32: 2 MiB."""


@dataclass(frozen=True)
class S3Point:
    """A paced training; `is_ahead` whether samples are read before they are asked for."""

    name: str
    step_s: float
    is_ahead: bool

    def predict(self, read_s: float) -> float:
        """Return the seconds that the simulation predicts, if a batch takes `read_s` to read."""
        plant = Plant(
            sample_bytes=1.0,
            producers=1,
            capture_s=0.0,
            task_samples=BATCH,
            step_samples=BATCH,
            step_s=self.step_s,
            watermark=BATCHES * BATCH,
            get_rate=BATCH / read_s,
            read_ahead=AHEAD_STEPS if self.is_ahead else 0,
        )
        return simulate(plant, BATCHES * BATCH, after_capture=True).seconds


POINTS = (
    S3Point("read one after another", 0.15, False),
    S3Point("read ahead, the steps are slower", 0.30, True),
    S3Point("read ahead, the store is slower", 0.02, True),
)


def make_refs(set_name: str, uri: str) -> list[SampleRef]:
    refs = []
    for number in range(BATCHES * BATCH):
        name = f"{set_name}-{number}"
        spec = FeatureSpec("last", SHAPE, "float32")
        refs.append(SampleRef(name, set_name, "made-up", uri, {"last": f"{name}-last"}, {"last": spec}))
    return refs


def read_set(store: KeyedFeatureStore, refs: list[SampleRef], step_s: float, is_ahead: bool) -> float:
    """Return the seconds of a training whose steps are pauses."""
    started = time.perf_counter()
    batches = [refs[first : first + BATCH] for first in range(0, len(refs), BATCH)]
    if is_ahead:
        for batch in batches[:AHEAD_STEPS]:
            store.expect(batch)
    for number, batch in enumerate(batches):
        if is_ahead and number + AHEAD_STEPS < len(batches):
            store.expect(batches[number + AHEAD_STEPS])
        for ref in batch:
            _, handle = store.get(ref)
            store.release(handle)
        time.sleep(step_s)
    return time.perf_counter() - started


def main(
    endpoint: Annotated[str, typer.Option(help="Of the server.")],
    url: Annotated[str, typer.Option(help="s3://bucket/prefix, below which a set is written.")],
    turns: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")] = None,
) -> None:
    """Print measured and predicted seconds."""
    torch.set_num_threads(1)
    set_name = uuid4().hex[:8]
    with tempfile.TemporaryDirectory(prefix="scaling.") as folder:
        objects = ObjectFeaturesSpec(url=f"{url.rstrip('/')}/{set_name}", access=BucketAccess(endpoint=endpoint))
        store = open_store(StoreSpec(kind="s3", root=Path(folder), objects=objects))
        refs = make_refs(set_name, store.uri)
        for ref in refs:
            store.put(ref, {"last": torch.rand(SHAPE)})
        store.flush()
        found: dict[str, list[list[float]]] = {point.name: [] for point in POINTS}
        for _ in range(turns):
            for point in POINTS:
                read_s = read_set(store, refs, 0.0, point.is_ahead) / BATCHES
                found[point.name].append(
                    [read_set(store, refs, point.step_s, point.is_ahead), point.predict(read_s), read_s]
                )
        store.free([key for ref in refs for key in ref.feature_keys.values()])
        store.close()
    for name, rows in found.items():
        measured, predicted, read_s = (statistics.median(column) for column in zip(*rows))
        print(
            f"{name:>33} {measured:6.2f} s measured {predicted:6.2f} s predicted {predicted / measured:5.2f} ({read_s:.3f} s to read)"
        )
    print(json.dumps(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
