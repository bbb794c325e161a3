"""Measured runs of this machine against the simulation of benchmarks/scaling_model.py.

    python benchmarks/scaling_points.py                         # about two minutes for each turn

The runs are those of benchmarks/overlap.py: a paced engine and paced steps around the real producer, store, control plane
and consumer. Nothing is fitted to them. What a batch costs beside the pauses is measured apart, in runs without pauses: a
producer that nobody waits for, and a trainer that finds everything in the store.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
import typer
from overlap import BATCH, Case, time_produced, time_stored, time_streamed
from scaling_model import Plant, simulate

SAMPLE_BYTES = 1.0
"""Any size: rates of links are stated in samples here."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a batch beside the pauses.

    Attributes:
        produce_s: to lease, capture, store and commit it in a stream.
        consume_s: to read, acknowledge and free it.
        store_s: to capture and store it without a stream.
    """

    produce_s: float
    consume_s: float
    store_s: float


@dataclass(frozen=True)
class Point:
    """A paced run. `step_s` None is a capture into a store that takes as long for a batch as the engine."""

    name: str
    batches: int
    engine_s: float
    step_s: float | None
    watermark_steps: int = 8

    def measure(self, folder: Path) -> float:
        case = Case(self.batches, self.engine_s, folder, self.step_s, self.watermark_steps)
        return time_stored(case) if self.step_s is None else time_streamed(case)

    def predict(self, costs: Costs) -> float:
        """Return the seconds that the simulation predicts."""
        storing_s = costs.produce_s if self.step_s is not None else costs.store_s + self.engine_s
        plant = Plant(
            sample_bytes=SAMPLE_BYTES,
            producers=1,
            capture_s=self.engine_s / BATCH,
            task_samples=BATCH,
            step_samples=BATCH,
            step_s=self.step_s or 0.0,
            watermark=self.watermark_steps * BATCH,
            put_rate=BATCH / storing_s,
            ack_s=0.0 if self.step_s is None else costs.consume_s / BATCH,
            read_ahead=0,
        )
        outcome = simulate(plant, self.batches * BATCH, after_capture=self.step_s is None)
        return outcome.captured_at if self.step_s is None else outcome.seconds


POINTS = (
    Point("equal pace", 24, 0.25, 0.25),
    Point("the engine is the slower one", 24, 0.40, 0.20),
    Point("the trainer is the slower one", 24, 0.15, 0.30),
    Point("a watermark of one step", 24, 0.25, 0.25, watermark_steps=1),
    Point("a store as slow as the engine", 24, 0.25, None),
)


def measure_costs(batches: int, folder: Path) -> Costs:
    """Return what a batch costs a producer and a trainer that never pause and never wait for each other."""
    for name in ("producer", "trainer", "store"):
        (folder / name).mkdir()
    produced = time_produced(Case(batches, 0.0, folder / "producer", 0.0, watermark_steps=batches))
    consumed = time_streamed(Case(batches, 0.0, folder / "trainer", 0.0), produces=False)
    stored = time_stored(Case(batches, 0.0, folder / "store"))
    return Costs(produced / batches, consumed / batches, stored / batches)


def compare(costs: Costs, measured: Mapping[str, list[float]]) -> list[dict[str, float | str]]:
    """Return for each point the median that was measured, what is predicted, and the ratio of both."""
    rows = []
    for point in POINTS:
        seconds, predicted = statistics.median(measured[point.name]), point.predict(costs)
        rows.append(
            {"point": point.name, "measured_s": seconds, "predicted_s": predicted, "ratio": predicted / seconds}
        )
    return rows


def main(
    turns: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")] = None,
) -> None:
    """Measure the costs of a batch and all points in turns, and print them beside the predictions."""
    torch.set_num_threads(1)
    measured: dict[str, list[float]] = {point.name: [] for point in POINTS}
    found: list[Costs] = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory(prefix="scaling.") as folder:
            (Path(folder) / "costs").mkdir()
            found.append(measure_costs(24, Path(folder) / "costs"))
            for point in POINTS:
                own = Path(folder) / point.name
                own.mkdir()
                measured[point.name].append(point.measure(own))
    names = [field.name for field in fields(Costs)]
    costs = Costs(*(statistics.median(getattr(each, name) for each in found) for name in names))
    rows = compare(costs, measured)
    print("a batch beside the pauses: " + ", ".join(f"{name} {value:.3f}" for name, value in asdict(costs).items()))
    for row in rows:
        print("{point:>30} {measured_s:7.2f} s measured {predicted_s:7.2f} s predicted {ratio:5.2f}".format_map(row))
    result = {"costs": asdict(costs), "measured": measured, "compared": rows}
    print(json.dumps(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    typer.run(main)
