"""Where the time of a training step goes, and what share of the core's own rate of matrix products it reaches.

    python benchmarks/step_time.py                                # every strategy at 1024x1, 512x4, 1024x4
    python benchmarks/step_time.py 512x4 --strategies eagle3 --no-compile

Whole steps (forward, backward, clipping, fused AdamW, one thread, fp32) take turns with a large square product, by
processor time. A dispatch mode then times every operator of forward and backward by itself: products of matrices,
attention, and the rest, which are passes over memory. What a step takes beyond them and the optimizer is overhead of
Python and autograd. Every product is timed again alone, at its shapes and strides.

Beside them, in the same turns, go steps of the same draft with its blocks compiled as `training.compile` does; the
seconds of the compilation are those by the clock of the first steps, with torch's caches off, above those of later ones:
20 to 150 a row on a busy machine, so that most of the time goes there. `--no-compile` leaves them out.

What can be reached is what a step would take with its products as fast as alone, its attention and optimizer as they
are, one copy of every product's result in place of all other passes, and no overhead.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import Aim, format_table, print_aims
from gpu_cases import Shape
from gpu_flops import FORMULAS, Work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_step import STRATEGIES, Case, made_up_options, prepare_samples, take_gradients

from draftworks.drafts.strategy import DraftStrategy
from draftworks.features.contracts import TrainBatch
from draftworks.training.optimizer import BF16Optimizer, LrSchedule
from draftworks.training.trainer import compile_blocks

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.mv, aten.addmv)
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten.bmm,
    aten.baddbmm,
    aten.baddbmm_,
)
"""Fused kernels, and batched products, which are scores and weighted sums."""
LEAST_SHARE = 0.55
AIMS = {"eagle3": 0.65}
"""By strategy, where it is not `LEAST_SHARE`."""
SQUARE = 2048
"""Rows and columns of the large product; of 2·n³ operations."""
COPIED = 2**20
"""Numbers in the copy that stands for a pass over memory: as many as a chunk of logits has."""
ALONE_SECONDS = 0.02
"""Processor time that a product is repeated for, at least."""


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of processor time of one step, medians over the steps, and rates.

    Attributes:
        spread: half of the range between the quartiles of `step_ms`, as a share of it.
        products_alone_ms: of the same products, one after another and nothing in between.
        passes_least_ms: of one copy of every product's result.
        gflop: what must be computed, see gpu_flops.py.
        sgemm_gflops: rate of the large square product, per second.
        compiled_ms: of a step with the draft's blocks compiled; None without.
        compiling_s: seconds that this took, by the clock.
    """

    size: str
    strategy: str
    step_ms: float
    spread: float
    products_ms: float
    products_alone_ms: float
    attention_ms: float
    passes_ms: float
    passes_least_ms: float
    optimizer_ms: float
    overhead_ms: float
    gflop: float
    sgemm_gflops: float
    compiled_ms: float | None = None
    compiling_s: float | None = None

    @property
    def reached(self) -> float:
        """Share of the square product's rate that the step reaches."""
        return self._share(self.step_ms)

    @property
    def reachable(self) -> float:
        """Share that it would reach as the top of this module says."""
        least = self.products_alone_ms + self.attention_ms + self.passes_least_ms + self.optimizer_ms
        return self._share(least)

    @property
    def compiled(self) -> float | None:
        """Share that the step reaches with compiled blocks."""
        return None if self.compiled_ms is None else self._share(self.compiled_ms)

    def _share(self, milliseconds: float) -> float:
        return self.gflop / (milliseconds / 1e3) / self.sgemm_gflops


def main(
    sizes: Annotated[list[str], typer.Argument(help="LENGTHxBATCH each.")] = ["1024x1", "512x4", "1024x4"],  # noqa: B006
    strategies: Annotated[list[str], typer.Option()] = list(STRATEGIES),  # noqa: B006
    steps: int = 7,
    compiles: Annotated[bool, typer.Option("--compile/--no-compile", help="Compiled blocks, too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here too.")] = None,
) -> None:
    """Measure every strategy at every size; prints a table of milliseconds, and the aims."""
    rows = measure(sizes, strategies, steps, compiles)
    print(table(rows))
    print_aims(aims(rows))
    if json_file is not None:
        lines = [
            {**asdict(row), "reached": row.reached, "reachable": row.reachable, "compiled": row.compiled}
            for row in rows
        ]
        json_file.write_text(json.dumps(lines, indent=1) + "\n")


def measure(sizes: Sequence[str], strategies: Sequence[str], steps: int, compiles: bool) -> list[StepTime]:
    """Return a row per size and strategy."""
    torch.set_num_threads(1)
    cases = [Case(*map(int, size.split("x")), strategy=name) for size in sizes for name in strategies]
    return [measure_case(case, steps, compiles=compiles) for case in cases]


def measure_case(case: Case, steps: int, square: int = SQUARE, compiles: bool = False) -> StepTime:
    """Return the row of one case."""
    strategy, samples = prepare_samples(case)
    batch = strategy.collate(samples, [str(i) for i in range(case.batch)])
    optimizer = make_optimizer(strategy)
    output = take_gradients(strategy, batch)
    optimizer.step()
    compiled = compile_step(case, batch) if compiles else None
    large = torch.randn(square, square)
    times: defaultdict[str, list[float]] = defaultdict(list)
    clocks = [OperatorClock() for _ in range(steps)]
    for clock in clocks:
        gradients = cpu_seconds(lambda: take_gradients(strategy, batch))
        optimizing = cpu_seconds(optimizer.step)
        with clock:
            take_gradients(strategy, batch)
        optimizer.step()
        if compiled is not None:
            times["compiled"].append(cpu_seconds(compiled.step))
        times["square"].append(cpu_seconds(lambda: large @ large))
        times["step"].append(gradients + optimizing)
        times["optimizer"].append(optimizing)
        times["overhead"].append(gradients - sum(clock.seconds.values()))
        for kind, seconds in clock.seconds.items():
            times[kind].append(seconds)
    found = {name: statistics.median(laps) for name, laps in times.items()}
    quarter, _, three_quarters = statistics.quantiles(times["step"], n=4)
    shape = Shape(
        *(case.hidden, case.heads, case.kv_heads, case.hidden // case.heads, case.intermediate, case.vocab), layers=8
    )
    work = Work.of(samples, output.metric_sums["acc_denoms"].tolist())
    flops = FORMULAS[case.strategy](shape, made_up_options(case), work).total
    return StepTime(
        size=f"{case.length}x{case.batch}",
        strategy=case.strategy,
        step_ms=found["step"] * 1e3,
        spread=(three_quarters - quarter) / 2 / found["step"],
        products_ms=found["products"] * 1e3,
        products_alone_ms=sum(count * time_alone(each) for each, count in clocks[0].products.items()) * 1e3,
        attention_ms=found["attention"] * 1e3,
        passes_ms=found["passes"] * 1e3,
        passes_least_ms=clocks[0].numbers_made * seconds_of_a_copied_number() * 1e3,
        optimizer_ms=found["optimizer"] * 1e3,
        overhead_ms=found["overhead"] * 1e3,
        gflop=flops / 1e9,
        sgemm_gflops=2 * square**3 / found["square"] / 1e9,
        compiled_ms=None if compiled is None else found["compiled"] * 1e3,
        compiling_s=None if compiled is None else compiled.compiling_s,
    )


def make_optimizer(strategy: DraftStrategy) -> BF16Optimizer:
    return BF16Optimizer(dict(strategy.model.named_parameters()), LrSchedule(1e-4, 100, "constant"))


@dataclass(frozen=True)
class CompiledStep:
    """A step with compiled blocks, and the seconds of the compilation by the clock."""

    step: Callable[[], object]
    compiling_s: float


FIRST_STEPS = 2
"""Steps in which functions are compiled: a second kind of arguments makes torch compile for all sizes."""


def compile_step(case: Case, batch: TrainBatch) -> CompiledStep | None:
    """Return the step of a draft of the same weights with compiled blocks; None where there is no compiler."""
    torch.compiler.reset()  # a row has nothing of the rows before
    strategy, _ = prepare_samples(case)
    if not compile_blocks(strategy, torch.device("cpu")):
        return None
    optimizer = make_optimizer(strategy)

    def step() -> None:
        take_gradients(strategy, batch)
        optimizer.step()

    with torch.compiler.config.patch(force_disable_caches=True):  # pyright: ignore[reportAttributeAccessIssue] - made late
        first = sum(wall_seconds(step) for _ in range(FIRST_STEPS))
    return CompiledStep(step, first - FIRST_STEPS * wall_seconds(step))


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def wall_seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Layout:
    """Sizes and strides of a float32 tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]

    def draw(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride).normal_()


@dataclass(frozen=True)
class Product:
    """An operator of `PRODUCTS` and its tensors."""

    operator: Any
    operands: tuple[Layout, ...]


KINDS = ("products", "attention", "passes")


class OperatorClock(TorchDispatchMode):
    """Times the operators that torch dispatches, and keeps which products there were.

    Attributes:
        seconds: processor time, by the names of `KINDS`.
        products: how often each was computed.
        numbers_made: elements in the results of all products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.products: Counter[Product] = Counter()
        self.numbers_made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func.overloadpacket
        kind = "products" if operator in PRODUCTS else "attention" if operator in ATTENTION else "passes"
        begin = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.seconds[kind] += time.thread_time() - begin
        if kind == "products":
            layouts = (Layout(tuple(each.shape), each.stride()) for each in args if isinstance(each, Tensor))
            self.products[Product(func, tuple(layouts))] += 1
            self.numbers_made += result.numel()
        return result


@functools.cache
def time_alone(product: Product) -> float:
    """Return the median processor seconds of the product of random matrices."""
    operands = [each.draw() for each in product.operands]
    laps: list[float] = []
    while len(laps) < 3 or sum(laps) < ALONE_SECONDS:
        laps.append(cpu_seconds(lambda: product.operator(*operands)))
    return statistics.median(laps)


@functools.cache
def seconds_of_a_copied_number() -> float:
    source, to = torch.randn(COPIED), torch.empty(COPIED)
    return statistics.median(cpu_seconds(lambda: to.copy_(source)) for _ in range(50)) / COPIED


def table(rows: Sequence[StepTime]) -> str:
    """Return the rows as Markdown, in milliseconds; shares are of the square product's rate."""
    if all(row.compiled is None for row in rows):
        return format_table(COLUMNS, [_cells(row) for row in rows])
    return format_table([*COLUMNS, *COMPILED_COLUMNS], [[*_cells(row), *_compiled_cells(row)] for row in rows])


COLUMNS = (
    *("size", "strategy", "step", "spread", "products", "alone", "attention", "passes", "least", "AdamW", "rest"),
    *("GFLOP", "share", "reachable"),
)
COMPILED_COLUMNS = ("share, compiled", "compiling, s")


def _cells(row: StepTime) -> list[str]:
    numbers = [row.products_ms, row.products_alone_ms, row.attention_ms, row.passes_ms, row.passes_least_ms]
    numbers += [row.optimizer_ms, row.overhead_ms, row.gflop]
    shown = [f"{number:.0f}" if abs(number) >= 10 else f"{number:.1f}" for number in numbers]
    shares = [f"{row.reached:.2f}", f"{row.reachable:.2f}"]
    return [row.size, row.strategy, f"{row.step_ms:.0f}", f"{row.spread:.0%}", *shown, *shares]


def _compiled_cells(row: StepTime) -> list[str]:
    if row.compiled is None or row.compiling_s is None:
        return ["", ""]
    return [f"{row.compiled:.2f}", f"{row.compiling_s:.0f}"]


def aims(rows: Sequence[StepTime]) -> list[Aim]:
    """Return the lowest share of every strategy beside what it should be."""
    lowest: dict[str, float] = {}
    for row in rows:
        lowest[row.strategy] = min(row.reached, lowest.get(row.strategy, row.reached))
    return [
        Aim(f"share of sgemm's rate in a step of {strategy}", share, AIMS.get(strategy, LEAST_SHARE))
        for strategy, share in lowest.items()
    ]


if __name__ == "__main__":
    typer.run(main)
