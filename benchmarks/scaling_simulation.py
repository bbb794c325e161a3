"""Hours, bytes and network of capture and training on 1 to 512 GPUs, stored and streamed, by simulation.

    python benchmarks/scaling_simulation.py                     # the tables of docs/scaling.md
    python benchmarks/scaling_simulation.py --gpus 16 --gpus 128 --conversations 3e6 --store-rate 40e9
    python benchmarks/scaling_simulation.py --json scaling.json

The defaults are the rates of docs/scaling.md, which says where each was measured, here or by others. What is streamed is
simulated for a number of steps and goes on at its steady rate; what is stored is captured by all GPUs and then trained by
all of them. How many GPUs of a stream capture is the split with the most samples per second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from scaling_model import Outcome, Plant, simulate

GPUS, CONVERSATIONS = (1, 8, 64, 512), (1e6, 1e7, 1e8)
GPUS_PER_NODE = 8
WATERMARK_STEPS = 4
STEPS = 48
"""Simulated steps of a stream: the middle of them is steady."""
TASK_SAMPLES = 16


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU and of what all share: seconds, bytes, and numbers per second.

    Attributes:
        capture_tokens: tokens per second of one GPU that captures.
        train_samples: samples per second of one GPU that trains.
        put_rate, get_rate: bytes per second from a capturing GPU's clients, and to a training GPU's.
        store_rate: bytes per second of a store for the whole set, of puts and gets.
        node_rate: bytes per second of a node's network, which is what a stream between nodes shares.
        commit_s, ack_s: seconds of the control plane for one sample.
        gpu_step_samples: samples that one GPU trains in an optimizer step.
    """

    tokens: int = 1024
    bytes_per_token: int = 49_152
    capture_tokens: float = 27_000.0
    train_samples: float = 6.5
    put_rate: float = 1.6e9
    get_rate: float = 0.72e9
    store_rate: float = 100e9
    node_rate: float = 25e9
    commit_s: float = 200e-6
    ack_s: float = 70e-6
    gpu_step_samples: int = 16

    @property
    def sample_bytes(self) -> int:
        return self.tokens * self.bytes_per_token

    def make_plant(self, capturing: int, training: int, store_rate: float) -> Plant:
        step = training * self.gpu_step_samples
        return Plant(
            sample_bytes=self.sample_bytes,
            producers=capturing,
            capture_s=self.tokens / self.capture_tokens,
            task_samples=TASK_SAMPLES,
            step_samples=step,
            step_s=self.gpu_step_samples / self.train_samples,
            watermark=WATERMARK_STEPS * step + TASK_SAMPLES,
            put_rate=self.put_rate,
            get_rate=training * self.get_rate,
            store_rate=store_rate,
            commit_s=self.commit_s,
            ack_s=self.ack_s,
        )

    def make_stored_plant(self, gpus: int) -> Plant:
        """Return the plant of a stored set: all GPUs capture, and then all of them train."""
        return self.make_plant(gpus, gpus, self.store_rate)

    def make_streamed_plant(self, gpus: int) -> Plant:
        """Return the plant of a stream with the best split of the GPUs; a single one takes turns."""
        nodes = math.ceil(gpus / GPUS_PER_NODE)
        if gpus == 1:
            return replace(self.make_plant(1, 1, self.node_rate), shares_device=True)
        splits = [self.make_plant(count, gpus - count, nodes * self.node_rate) for count in range(1, gpus)]
        return max(splits, key=lambda plant: min(plant.compute_limits().values()))


@dataclass(frozen=True)
class Forecast:
    """What a number of GPUs does with an epoch.

    Attributes:
        stored_capture, stored_training, streamed: samples per second.
        stored_bound, streamed_bound: the part that decides; of a stored set, of capture and of training.
        ack_share: of a streamed step that is the acknowledgement of its samples.
        puts, gets: bytes per second of a stream.
        held_bytes: of features that a stream holds, at most.
    """

    gpus: int
    capturing: int
    training: int
    step_samples: int
    stored_capture: float
    stored_training: float
    stored_bound: str
    streamed: float
    streamed_bound: str
    ack_share: float
    puts: float
    gets: float
    held_bytes: float

    def compute_stored_hours(self, samples: float) -> float:
        return (samples / self.stored_capture + samples / self.stored_training) / 3600

    def compute_streamed_hours(self, samples: float) -> float:
        return samples / self.streamed / 3600


def forecast(rates: Rates, gpus: int) -> Forecast:
    """Simulate a stored and a streamed epoch on `gpus` GPUs."""
    stored, streamed = rates.make_stored_plant(gpus), rates.make_streamed_plant(gpus)
    phases = simulate(stored, STEPS * stored.step_samples, after_capture=True)
    stream = simulate(streamed, STEPS * streamed.step_samples)
    capture_rate = phases.captured / phases.captured_at
    return Forecast(
        gpus=gpus,
        capturing=streamed.producers,
        training=1 if streamed.shares_device else gpus - streamed.producers,
        step_samples=streamed.step_samples,
        stored_capture=capture_rate,
        stored_training=phases.steady_rate,
        stored_bound=f"{_name_capture_bound(stored)}, {_name_training_bound(stored)}",
        streamed=stream.steady_rate,
        streamed_bound=streamed.slowest,
        ack_share=_share_of_acks(streamed, stream),
        puts=stream.steady_rate * rates.sample_bytes,
        gets=stream.steady_rate * rates.sample_bytes,
        held_bytes=stream.peak_samples * rates.sample_bytes,
    )


def _name_capture_bound(plant: Plant) -> str:
    limits = plant.compute_limits()
    only_puts = {"capture": limits["capture"], "puts": limits["puts"], "store": 2 * limits["store"]}
    return min(only_puts, key=only_puts.__getitem__)


def _name_training_bound(plant: Plant) -> str:
    limits = plant.compute_limits()
    only_gets = {"training": limits["training"], "gets": limits["gets"], "store": 2 * limits["store"]}
    return min(only_gets, key=only_gets.__getitem__)


def _share_of_acks(plant: Plant, outcome: Outcome) -> float:
    return plant.ack_s * outcome.steady_rate


def format_tables(rates: Rates, gpus: Sequence[int], conversations: Sequence[float]) -> list[str]:
    """Return the tables as lines of Markdown: bytes of a set, hours, and network and memory of a stream."""
    forecasts = [forecast(rates, count) for count in gpus]
    set_bytes = [samples * rates.sample_bytes for samples in conversations]
    named = [f"{_format_count(samples)} conversations" for samples in conversations]
    lines = _format_table(
        ["", *named],
        [
            ["features of a stored set", *(_format_bytes(size) for size in set_bytes)],
            ["moved in an epoch, put and got once", *(_format_bytes(2 * size) for size in set_bytes)],
            ["references", *(_format_bytes(319 * samples) for samples in conversations)],
            [
                "processor time of the control plane",
                *(f"{_format_number(97e-6 * samples / 3600)} h" for samples in conversations),
            ],
        ],
    )
    hours = []
    for each in forecasts:
        stored = [_format_number(each.compute_stored_hours(samples)) for samples in conversations]
        streamed = [_format_number(each.compute_streamed_hours(samples)) for samples in conversations]
        hours.append([f"{each.gpus}, stored", *stored, each.stored_bound])
        hours.append([f"{each.gpus}, streamed", *streamed, each.streamed_bound])
    lines += ["", *_format_table(["GPUs", *(f"{name}, h" for name in named), "decided by"], hours)]
    network = [
        [
            str(each.gpus),
            "in turns" if each.gpus == 1 else f"{each.capturing} + {each.training}",
            _format_number(each.streamed),
            _format_number(each.puts / 1e9),
            _format_number(each.streamed / each.capturing * GPUS_PER_NODE * rates.sample_bytes * 8e-9)
            if each.gpus > GPUS_PER_NODE
            else "–",
            _format_number(each.streamed / each.training * GPUS_PER_NODE * rates.sample_bytes * 8e-9)
            if each.gpus > GPUS_PER_NODE
            else "–",
            _format_bytes(each.held_bytes),
            f"{100 * each.ack_share:.0f}%",
        ]
        for each in forecasts
    ]
    heads = ["GPUs", "capture + train", "samples/s", "GB/s each way", "Gbit/s, capturing node", "Gbit/s, training node"]
    return [*lines, "", *_format_table([*heads, "held at most", "a step's acknowledgement"], network)]


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _format_count(number: float) -> str:
    return f"{number / 1e6:g} M"


def _format_bytes(size: float) -> str:
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if size >= factor:
            return f"{_format_number(size / factor)} {unit}"
    return f"{_format_number(size / 1e6)} MB"


def _format_number(number: float) -> str:
    """Return a number with two or three digits that count."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


DEFAULTS = Rates()


def main(
    gpus: Annotated[
        list[int] | None, typer.Option(min=1, help="Of all nodes; repeat it. Default: 1, 8, 64, 512.")
    ] = None,
    conversations: Annotated[list[float] | None, typer.Option(min=1, help="Repeat it. Default: 1e6, 1e7, 1e8.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a conversation.")] = DEFAULTS.tokens,
    bytes_per_token: Annotated[int, typer.Option(min=1)] = DEFAULTS.bytes_per_token,
    capture_tokens: Annotated[float, typer.Option(help="Tokens/s of a GPU that captures.")] = DEFAULTS.capture_tokens,
    train_samples: Annotated[float, typer.Option(help="Samples/s of a GPU that trains.")] = DEFAULTS.train_samples,
    put_rate: Annotated[float, typer.Option(help="Bytes/s from a capturing GPU into the store.")] = DEFAULTS.put_rate,
    get_rate: Annotated[float, typer.Option(help="Bytes/s to a training GPU.")] = DEFAULTS.get_rate,
    store_rate: Annotated[float, typer.Option(help="Bytes/s of the store of a whole set.")] = DEFAULTS.store_rate,
    node_rate: Annotated[float, typer.Option(help="Bytes/s of a node's network.")] = DEFAULTS.node_rate,
    commit_s: Annotated[float, typer.Option(help="Control plane's seconds to commit a sample.")] = DEFAULTS.commit_s,
    ack_s: Annotated[float, typer.Option(help="And to acknowledge it.")] = DEFAULTS.ack_s,
    gpu_step_samples: Annotated[int, typer.Option(min=1, help="Of a step, per GPU.")] = DEFAULTS.gpu_step_samples,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write rates and forecasts.")] = None,
) -> None:
    """Print the tables of docs/scaling.md for these rates."""
    rates = Rates(
        tokens, bytes_per_token, capture_tokens, train_samples, put_rate, get_rate, store_rate, node_rate, commit_s,
        ack_s, gpu_step_samples,
    )  # fmt: skip
    gpus = gpus or list(GPUS)
    print("\n".join(format_tables(rates, gpus, conversations or CONVERSATIONS)))
    if json_file is not None:
        forecasts = [asdict(forecast(rates, count)) for count in gpus]
        json_file.write_text(json.dumps({"rates": asdict(rates), "forecasts": forecasts}, indent=2))


if __name__ == "__main__":
    typer.run(main)
