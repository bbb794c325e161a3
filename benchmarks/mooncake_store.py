"""What our Mooncake store costs above Mooncake's own calls: put and get of one size, in turns.

    make mooncake-env
    LD_LIBRARY_PATH=… .venv-mooncake/bin/python benchmarks/mooncake_store.py --mib 16 --rounds 15     # see docs/mooncake.md

A store of its own is started on the loopback interface, its memory in another process, over TCP. In each round the raw
calls (`put_from`, `get_into` with registered buffers, hard-pinned) and the store put and get one tensor, in an order
that changes from round to round. A share is the median of the rounds' quotients raw time / our time.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from figures import format_table

from draftworks.features.contracts import SampleRef
from draftworks.features.mooncake_store import MooncakeFeatureStore
from draftworks.mooncake.client import MooncakeClient, Region
from draftworks.mooncake.service import MooncakeOptions, MooncakeService


@dataclass
class Side:
    """One way to put and get, with the times of its rounds in seconds."""

    name: str
    put: Callable[[int, torch.Tensor], None]
    get: Callable[[int, torch.Tensor], None]
    free: Callable[[int], None]
    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)

    def run(self, index: int, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        began = time.perf_counter()
        self.put(index, tensor)
        middle = time.perf_counter()
        self.get(index, expected)
        self.get_s.append(time.perf_counter() - middle)
        self.put_s.append(middle - began)
        self.free(index)


def build_raw(client: MooncakeClient, nbytes: int) -> Side:
    """Return the library's own calls, with buffers that are registered once."""
    library, pinned = client._library_store, client._pinned
    into = torch.zeros(nbytes, dtype=torch.uint8)
    source = torch.zeros(nbytes, dtype=torch.uint8)
    for buffer in (into, source):
        assert client.register(Region(buffer.data_ptr(), nbytes, buffer))

    def put(index: int, _: torch.Tensor) -> None:
        assert library.put_from(f"raw/{index}", source.data_ptr(), nbytes, pinned) == 0

    def get(index: int, _: torch.Tensor) -> None:
        assert library.get_into(f"raw/{index}", into.data_ptr(), nbytes) == nbytes

    def free(index: int) -> None:
        client.remove([f"raw/{index}"], force=True)

    return Side("raw", put, get, free)


def build_ours(store: MooncakeFeatureStore) -> Side:
    refs: dict[int, SampleRef] = {}

    def put(index: int, tensor: torch.Tensor) -> None:
        refs[index] = store.put(SampleRef(f"k{index}", "", "", "", {"last": f"{index:032x}"}, {}), {"last": tensor})

    def get(index: int, _: torch.Tensor) -> None:
        store.release(store.get(refs[index])[1])

    def free(index: int) -> None:
        store.free(refs.pop(index).feature_keys.values())

    return Side("ours", put, get, free)


def measure(sides: list[Side], tensor: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Run all sides in turns; return figures by side: medians in MB/s, and shares of the raw calls' speed."""
    orders = list(itertools.permutations(sides))
    for index in range(-2, rounds):  # two rounds that touch all memory first
        for side in orders[index % len(orders)]:
            side.run(index + 2, tensor, tensor)
    raw = sides[0]
    figures = {}
    for side in sides:
        figures[side.name] = {
            "put_mb_per_s": round(tensor.nbytes / 1e6 / statistics.median(side.put_s[2:])),
            "get_mb_per_s": round(tensor.nbytes / 1e6 / statistics.median(side.get_s[2:])),
            "put_share_of_raw": _share(raw.put_s[2:], side.put_s[2:]),
            "get_share_of_raw": _share(raw.get_s[2:], side.get_s[2:]),
        }
    return figures


def _share(raw: list[float], ours: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(raw, ours, strict=True)), 3)


def main(
    mib: Annotated[float, typer.Option(help="size of the tensor")] = 16.0,
    rounds: Annotated[int, typer.Option(help="rounds that count")] = 15,
) -> None:
    os.environ.setdefault("MC_STORE_MEMCPY", "0")
    tensor = torch.randn(int(mib * (1 << 20)) // 4)
    with tempfile.TemporaryDirectory() as folder:
        options = MooncakeOptions(max(64 << 20, 8 * tensor.nbytes), store_id="bench")
        with MooncakeService(options, Path(folder)) as service:
            client = MooncakeClient(service.address)
            store = MooncakeFeatureStore(service.address_file, 0.0, connect=lambda _: client)
            figures = measure([build_raw(client, tensor.nbytes), build_ours(store)], tensor, rounds)
            client.close()
    columns = ("", *(name.replace("_", " ") for name in next(iter(figures.values()))))
    print(format_table(columns, [[name, *map(str, each.values())] for name, each in figures.items()]))
    print(json.dumps({"mib": mib, "rounds": rounds, "load": os.getloadavg()[0], **figures}))


if __name__ == "__main__":
    typer.run(main)
