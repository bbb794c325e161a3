"""The engine on a GPU: how exact it is, how fast each strategy trains, and which share of the device's peak that is.

    PYTHONPATH=. python benchmarks/gpu.py                                  # every strategy at the sizes of Qwen3-8B
    PYTHONPATH=. python benchmarks/gpu.py --strategy domino --compile
    PYTHONPATH=. python benchmarks/gpu.py --size tiny --device cpu         # the same code, anywhere

Needs the engine only, no Dagster: see docs/gpu.md. Steps are the trainer's own (FSDP2 over one rank, fp32 masters, bf16
compute, clipping, fused AdamW) on random features, on samples of `--length` tokens and three of a half to all of it.
MFU is the operations of gpu_flops.py over the peak in the device's data sheet. `copy` is the transfer of the batch to
the device, not part of the step; the parts of a step are timed by device events in separate steps.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from gpu_cases import SHAPES, engine_strategies, made_up_draft, made_up_samples, made_up_target, names_of
from gpu_equivalence import Difference, differences
from gpu_flops import FORMULAS, Work, peak_flops
from gpu_steps import StepTimes, end_step, timed, trainer_core
from pydantic import TypeAdapter

from draftworks.config.base import Dtype
from draftworks.drafts.decoder_strategy import DecoderStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.training.backend import ensure_process_group
from draftworks.training.optimizer import TrainerCore

SHARES = (1.0, 0.5, 0.7, 0.9)
"""Lengths of a batch's samples relative to the longest, repeated for larger batches."""

DIFFERENCE_HEADER = (
    "a small draft, against the CPU in fp32:\n"
    f"{'strategy':>9} {'device':>6} {'dtype':>9} {'layout':>7} {'loss':>8} {'1 - cos':>8} {'proposals':>9}"
)
RESULT_HEADER = (
    f"{'strategy':>9} {'layout':>7} {'ms/step':>8} {'forward':>8} {'backward':>8} {'AdamW':>7} {'copy':>6} {'tokens/s':>9} "
    f"{'peak GB':>8} {'TFLOP':>8} {'MFU':>6}"
)


@dataclass(frozen=True)
class Case:
    """The measured configuration, without strategy and batch layout."""

    size: str
    lengths: tuple[int, ...]
    dtype: Dtype
    attention: str
    compiled: bool
    steps: int
    warm_up: int


@dataclass(frozen=True)
class Result:
    """Figures of one strategy, or the problem that prevented them. Tokens exclude padding."""

    case: Case
    strategy: str
    layout: str
    times: StepTimes | None = None
    tokens_per_s: float | None = None
    tflop: float | None = None
    mfu: float | None = None
    problem: str | None = None


def main(
    size: Annotated[str, typer.Option(help=f"Sizes of target and drafts: {', '.join(SHAPES)}.")] = "qwen3-8b",
    strategy: Annotated[list[str] | None, typer.Option(help="Only these; may be given several times.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the longest sample.")] = 2048,
    batch: Annotated[int, typer.Option(help="Samples of a step.")] = 4,
    steps: int = 10,
    warm_up: int = 5,
    dtype: str = "bfloat16",
    attention: str = "auto",
    compile: Annotated[bool, typer.Option(help="As training.compile.")] = False,
    device: Annotated[str, typer.Option(help="auto is a GPU if there is one.")] = "auto",
    peak_tflops: Annotated[float | None, typer.Option(help="Of the device, where its name says nothing.")] = None,
    equivalence: Annotated[bool, typer.Option(help="Compare with the CPU first.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results here, with all their digits.")
    ] = None,
) -> None:
    """Compare and measure; prints tables as rows finish, and writes each row as a JSON line."""
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    peak = peak_tflops * 1e12 if peak_tflops else peak_flops(device_name(where))
    names = strategy or engine_strategies()
    print(headline(where, peak))
    lines: list[str] = []
    if equivalence:
        print(DIFFERENCE_HEADER)
        for name in names:
            for one in differences(name, where):
                print(difference_row(one), flush=True)
                lines.append(json.dumps({"difference": asdict(one)}))
    lengths = tuple(max(8, round(length * SHARES[index % len(SHARES)])) for index in range(batch))
    case = Case(size, lengths, TypeAdapter(Dtype).validate_python(dtype), attention, compile, steps, warm_up)
    print(RESULT_HEADER)
    for result in measured(names, case, where, peak):
        print(result_row(result), flush=True)
        lines.append(json.dumps({"step": asdict(result)}))
    if json_file is not None:
        json_file.write_text("\n".join(lines) + "\n")


def measured(names: Sequence[str], case: Case, device: torch.device, peak: float | None) -> Iterator[Result]:
    """Measure each strategy in both layouts; a case that runs out of memory is reported, and the next one runs."""
    target = made_up_target(SHAPES[case.size], device, torch.bfloat16)
    with ensure_process_group(device):
        for name in names:
            core: TrainerCore | None = None
            for layout in ("padded", "packed"):
                try:
                    core = core or _made_up_core(name, target, case, device)
                    yield measure(core, case, layout, peak)
                except torch.OutOfMemoryError as error:
                    core = None  # a step that ended half-way can't be followed by another
                    yield Result(case, name, layout, problem=str(error).split(". ")[0])
                _give_back_memory(device)


def _made_up_core(name: str, target: TargetParts, case: Case, device: torch.device) -> TrainerCore:
    strategy = made_up_draft(name, SHAPES[case.size], target, attention=case.attention)
    return trainer_core(strategy, device, case.dtype, case.compiled)


def measure(core: TrainerCore, case: Case, layout: str, peak: float | None) -> Result:
    strategy, shape = core.strategy, SHAPES[case.size]
    samples = made_up_samples(strategy, shape, case.lengths, torch.bfloat16)
    lay = strategy.pack if layout == "packed" else strategy.collate
    batch = lay(samples, names_of(samples))
    rows = end_step(core, batch).totals.supervised
    times = timed(core, batch, case.steps, case.warm_up)
    seconds, flops = times.step_ms / 1e3, None
    if isinstance(strategy, DecoderStrategy) and strategy.name in FORMULAS:
        flops = FORMULAS[strategy.name](shape, strategy.options, Work.of(samples, rows)).total
    return Result(
        case,
        strategy.name,
        layout,
        times,
        tokens_per_s=sum(case.lengths) / seconds,
        tflop=None if flops is None else flops / 1e12,
        mfu=None if flops is None or peak is None else flops / seconds / peak,
    )


def _give_back_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def headline(device: torch.device, peak: float | None) -> str:
    known = "unknown: give --peak-tflops for an MFU" if peak is None else f"{peak / 1e12:.0f} TFLOP/s"
    return f"{device_name(device)}, torch {torch.__version__}; peak {known}"


def difference_row(one: Difference) -> str:
    return (
        f"{one.strategy:>9} {one.device:>6} {one.dtype:>9} {one.layout:>7} {one.loss:>8.1e} {one.gradient:>8.1e} "
        f"{one.proposals:>9.2%}"
    )


def result_row(result: Result) -> str:
    times, named = result.times, f"{result.strategy:>9} {result.layout:>7} "
    if times is None:
        return named + str(result.problem)
    peak = "–" if times.peak_bytes is None else f"{times.peak_bytes / 1e9:.1f}"
    tflop = "–" if result.tflop is None else f"{result.tflop:.3g}"
    mfu = "–" if result.mfu is None else f"{result.mfu:.1%}"
    return named + (
        f"{times.step_ms:>8.1f} {times.forward_ms:>8.1f} {times.backward_ms:>8.1f} {times.optimizer_ms:>7.1f} "
        f"{times.copy_ms:>6.1f} {result.tokens_per_s:>9.0f} {peak:>8} {tflop:>8} {mfu:>6}"
    )


if __name__ == "__main__":
    typer.run(main)
