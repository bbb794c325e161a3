"""Bytes on the disk of features in fp8 as a share of bfloat16's, and what encoding and decoding cost.

    .venv/bin/python benchmarks/fp8_features.py --hidden 4096 --tokens 1024 --samples 8 --rounds 9

Four streams, as EAGLE-3 reads: three taps and `last`. Bytes are those of the store's files, headers included. Times are
medians of rounds that take the storages in turns: encoding and putting, and getting and decoding.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftworks.capture.capture_plan import StreamPlan
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.tensor_bytes import decode_features
from draftworks.storage.identity import EngineIdentity, FeatureIdentity, LastHidden, LayerTap, digest

STORAGES = ("plain", "fp8", "fp8_taps")


def make_plan(storage: str, hidden: int) -> StreamPlan:
    identity = FeatureIdentity("benchmark", EngineIdentity("random"), "bfloat16", storage)
    return StreamPlan((LayerTap(2), LayerTap(18), LayerTap(33), LastHidden()), identity, hidden)


def run(storage: str, samples: list[Mapping[str, Tensor]], plan: StreamPlan) -> tuple[int, float, float]:
    """Return the bytes of a new store's files, the seconds of writing and those of reading every sample."""
    with tempfile.TemporaryDirectory() as folder:
        store = LocalFeatureStore(Path(folder), keep_tensors=True)
        started = time.perf_counter()
        refs = [
            store.put(SampleRef(f"s{i}", "", "", "", plan.make_keys(digest(i)), {}), plan.encode(sample))
            for i, sample in enumerate(samples)
        ]
        store.flush()
        written = time.perf_counter()
        for ref in refs:
            decode_features(store.get(ref)[0], storage)
        read = time.perf_counter()
        nbytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        store.close()
    return nbytes, written - started, read - written


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("hidden", 4096), ("tokens", 1024), ("samples", 8), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    plans = {storage: make_plan(storage, args.hidden) for storage in STORAGES}
    shape = (args.tokens, args.hidden)
    samples: list[Mapping[str, Tensor]] = [
        {name: torch.randn(shape).bfloat16() for name in plans["fp8"].names} for _ in range(args.samples)
    ]
    found = defaultdict(list)
    for _ in range(args.rounds):
        for storage in STORAGES:
            found[storage].append(run(storage, samples, plans[storage]))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    plain = medians["plain"]
    print(f"{'':10} {'bytes':>14} {'share':>7} {'writing':>9} {'reading':>9}   (times as shares of plain's)")
    for storage in STORAGES:
        nbytes, *_ = medians[storage]
        size, writing, reading = (value / other for value, other in zip(medians[storage], plain, strict=True))
        print(f"{storage:10} {nbytes:14,.0f} {size:7.4f} {writing:9.2f} {reading:9.2f}")
    print(f"plain: writing {plain[1]:.2f} s, reading {plain[2]:.2f} s, hidden {args.hidden}")


if __name__ == "__main__":
    main()
