"""Work of a session on a GPU with training steps: the device's ceilings, every strategy, and its kernels."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from gpu import Case, device_name, measure
from gpu_cases import SHAPES, made_up_draft, made_up_samples, made_up_target, names_of
from gpu_flops import peak_flops
from gpu_steps import CONTEXT, trainer_core
from session_rows import RowFile
from session_tasks import Settings, Task
from torch.profiler import ProfilerActivity, profile

from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.training.backend import ensure_process_group

MOST_KERNELS = 25
Ready = Callable[[], None]


@functools.cache
def cpu_target(size: str) -> TargetParts:
    """Return the target of a size on the CPU; processes that are forked afterwards have it too."""
    return made_up_target(SHAPES[size], "cpu", torch.bfloat16)


def build_draft(name: str, settings: Settings) -> DraftStrategy:
    return made_up_draft(name, SHAPES[settings.size], cpu_target(settings.size))


def measure_ceilings(task: Task, settings: Settings, rows: RowFile, ready: Ready) -> None:
    """Measure a product of random bf16 matrices, and a copy on the device, counting bytes read and written."""
    ready()
    device = torch.device(settings.device)
    edge = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    ms = median_ms(lambda: torch.mm(left, right, out=out), device, 20)
    rows.add(task.part, task.name, key="product", ms=ms, tflops=2 * edge**3 / ms / 1e9)
    count = 2**31 if device.type == "cuda" else 2**22
    source = torch.randint(255, (count,), device=device, dtype=torch.uint8)
    copy = torch.empty_like(source)
    ms = median_ms(lambda: copy.copy_(source), device, 20)
    rows.add(task.part, task.name, key="copy", ms=ms, tb_per_s=2 * count / ms / 1e9)


def measure_strategy(task: Task, settings: Settings, rows: RowFile, ready: Ready) -> None:
    """Measure a strategy's training steps, packed; `arguments` is its name and `default` or `compiled`."""
    name, mode = task.arguments
    draft = build_draft(name, settings)
    ready()
    device = torch.device(settings.device)
    options = ("bfloat16", "auto", mode == "compiled", settings.steps, settings.warm_up)
    case = Case(settings.size, settings.lengths, *options)
    begin = time.monotonic()
    with ensure_process_group(device):
        core = trainer_core(draft, device, "bfloat16", case.compiled)
        found = measure(core, case, "packed", peak_flops(device_name(device)))
    assert found.times is not None
    peak = found.times.peak_bytes
    rows.add(
        task.part,
        task.name,
        key="step",
        strategy=name,
        mode=mode,
        **asdict(found.times),
        tokens_per_s=found.tokens_per_s,
        samples_per_s=len(settings.lengths) / found.times.step_ms * 1e3,
        peak_gb=None if peak is None else peak / 1e9,
        tflop=found.tflop,
        mfu=found.mfu,
        seconds=round(time.monotonic() - begin, 1),
    )


def list_kernels(task: Task, settings: Settings, rows: RowFile, ready: Ready) -> None:
    """Write the kernels of one step with the most time; `arguments` is the strategy's name."""
    name, device = task.arguments[0], torch.device(settings.device)
    draft = build_draft(name, settings)
    samples = made_up_samples(draft, SHAPES[settings.size], settings.lengths, torch.bfloat16)
    ready()
    with ensure_process_group(device):
        core = trainer_core(draft, device, "bfloat16")
        batch = draft.pack(samples, names_of(samples)).to(device)
        for _ in range(settings.warm_up):
            core.train_step(batch, CONTEXT)
        synchronize(device)
        kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        with profile(activities=[kind]) as profiler:
            begin = time.perf_counter()
            core.train_step(batch, CONTEXT)
            synchronize(device)
            wall_ms = (time.perf_counter() - begin) * 1e3
    results: Any = profiler.profiler
    found = sum_kernels(results.kineto_results.events(), device)
    rows.add(task.part, task.name, key="kernels", strategy=name, step_ms=wall_ms, **found)


def sum_kernels(events: Any, device: torch.device) -> dict[str, Any]:
    """Return the kernels with the most time, the number of all, and the time in which none ran between first and last."""
    spans, totals = [], {}
    for event in events:
        if str(event.device_type()).endswith("CUDA") != (device.type == "cuda"):
            continue
        begin, length = event.start_ns(), event.duration_ns()
        spans.append((begin, begin + length))
        calls, spent = totals.get(event.name(), (0, 0))
        totals[event.name()] = (calls + 1, spent + length)
    most = sorted(totals.items(), key=lambda each: -each[1][1])[:MOST_KERNELS]
    table = [{"name": name[:160], "calls": calls, "ms": spent / 1e6} for name, (calls, spent) in most]
    busy, reached = 0, 0
    for begin, end in sorted(spans):
        busy += max(0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - min((begin for begin, _ in spans), default=0)
    return {"launches": len(spans), "busy_ms": busy / 1e6, "idle_share": 1 - busy / max(whole, 1), "kernels": table}


def median_ms(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median milliseconds of a call, after three; by device events on a GPU."""
    for _ in range(3):
        work()
    synchronize(device)
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        synchronize(device)
        return statistics.median(begin.elapsed_time(end) for begin, end in zip(marks, marks[1:]))
    laps = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        laps.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(laps)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
