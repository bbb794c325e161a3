"""One prepared session on a GPU that is lent for minutes: seven parts, each with its budget, and a row for each figure.

    PYTHONPATH=. python benchmarks/gpu_session.py --out session.jsonl --budget 480
    PYTHONPATH=. python benchmarks/gpu_session.py --out session.jsonl --resume --parts peers,kernels
    PYTHONPATH=. python benchmarks/gpu_session.py --out tiny.jsonl --device cpu --size tiny --budget 150
    python benchmarks/gpu_session.py --out session.jsonl --page tables.md

See docs/gpu.md. Every task is a process that is killed when its time is over; its rows are in the file by then. What is
left out is a row too. What processes print to stderr is in a `.log` file beside the rows.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from session_rows import RowFile
from session_tasks import Part, Session, Settings, Task, keep_open

SHARES = (1.0, 0.5, 0.7, 0.9)
"""Lengths of the samples relative to the longest, as in gpu.py."""
STRATEGIES = ("eagle3", "dspark", "dflash", "dflash2", "peagle", "domino", "lilicorr", "xpress")
PEERS = (
    ("eagle3", "SpecForge"),
    ("dflash", "SpecForge"),
    ("eagle3", "speculators"),
    ("dflash", "speculators"),
    ("dspark", "SpecForge"),
    ("domino", "SpecForge"),
    ("dspark", "speculators"),
    ("peagle", "SpecForge"),
    ("peagle", "speculators"),
    ("dflash2", "speculators"),
    ("xpress", "speculators"),
)
"""What the peers train of our strategies; the first are those that most train."""
BUDGETS: dict[str, float] = {
    "ceilings": 20,
    "strategies": 150,
    "peers": 150,
    "kernels": 60,
    "tests": 90,
    "capture": 30,
    "verify": 40,
}
"""Seconds of each part."""


def main(
    out: Annotated[Path, typer.Option(help="Rows are appended to this file.")],
    parts: Annotated[str, typer.Option(help="Parts in order, with commas.")] = ",".join(BUDGETS),
    only: Annotated[str, typer.Option(help="Tasks with one of these words, with commas.")] = "",
    budget: Annotated[float, typer.Option(help="Seconds in all.")] = 480.0,
    seconds: Annotated[str, typer.Option(help="Of parts instead of theirs: peers=200,tests=60.")] = "",
    resume: Annotated[bool, typer.Option(help="Leave out what this card has rows of.")] = False,
    device: str = "auto",
    size: str = "qwen3-8b",
    length: Annotated[int | None, typer.Option(help="Tokens of the longest sample.")] = None,
    worst: Annotated[str, typer.Option(help="Strategies whose kernels are listed beside EAGLE-3's and DFlash's.")] = "",
    tests: Annotated[str, typer.Option(help="What the part `tests` runs, with commas.")] = "tests/gpu",
    wheels: Annotated[Path | None, typer.Option(help="Folder of the peers' packages, if Python has them not.")] = None,
    fresh: Annotated[bool, typer.Option(help="Start processes anew instead of by a fork.")] = False,
    page: Annotated[Path | None, typer.Option(help="Only write tables of the rows here.")] = None,
) -> None:
    """Run the parts, or write their tables."""
    if page is not None:
        page.write_text(importlib.import_module("session_page").make_page(out))
        return
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a GPU must not start CUDA here: children are forked
    card = find_card() if device in ("auto", "cuda") else None
    where = "cpu" if card is None else "cuda"
    longest = length or (48 if size == "tiny" else 2048)
    lengths = tuple(max(8, round(longest * share)) for share in SHARES)
    rows = RowFile(out.resolve(), card or "cpu")
    settings = Settings(where, size, lengths, steps=5, warm_up=2, wheels=wheels)
    budgets = BUDGETS | {name: float(given) for name, given in (each.split("=") for each in split(seconds))}
    wanted = keep_open(list_parts(split(parts), rows, budgets, worst, tests), rows, resume, split(only))
    Session(settings, rows, "spawn" if fresh else preload(settings, wanted)).run(wanted, budget)


def split(words: str) -> list[str]:
    return [word for word in words.split(",") if word]


def find_card() -> str | None:
    """Return the name of the GPU by `nvidia-smi`; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def list_parts(
    names: Sequence[str], rows: RowFile, budgets: Mapping[str, float], worst: str = "", tests: str = "tests/gpu"
) -> list[Part]:
    """Return the parts in the order of `names`."""
    kernels = dict.fromkeys(["eagle3", "dflash", *(split(worst) or find_worst(rows))])
    modes = [(name, mode) for mode in ("default", "compiled") for name in STRATEGIES]
    strategies = [
        Task("strategies", f"{name} {mode}", "session_steps:measure_strategy", 45.0, (name, mode))
        for name, mode in modes
    ]
    races = [Task("peers", f"{name} {rival}", "session_peers:race", 80.0, (name, rival)) for name, rival in PEERS]
    listed = [Task("kernels", name, "session_steps:list_kernels", 30.0, (name,)) for name in kernels]
    everything = {
        "ceilings": (Task("ceilings", "ceilings", "session_steps:measure_ceilings", 20.0),),
        "strategies": tuple(strategies),
        "peers": tuple(races),
        "kernels": tuple(listed),
        "tests": (Task("tests", "tests", "session_tests:run_tests", 90.0, tuple(split(tests))),),
        "capture": (Task("capture", "capture", "session_targets:measure_capture", 30.0),),
        "verify": (Task("verify", "verify", "session_targets:measure_verify", 40.0),),
    }
    return [Part(name, budgets[name], everything[name]) for name in names]


def find_worst(rows: RowFile) -> list[str]:
    """Return the two strategies with the lowest MFU, by default options, of the rows there are."""
    mfu = {
        row["strategy"]: row["mfu"] for row in rows.read("strategies") if row.get("mode") == "default" and row["mfu"]
    }
    return sorted(mfu, key=lambda name: mfu[name])[:2] or ["domino", "xpress"]


def preload(settings: Settings, parts: Sequence[Part]) -> str:
    """Import what the tasks import, so that a fork has it; return how processes are to be started."""
    modules = dict.fromkeys(task.work.split(":")[0] for part in parts for task in part.tasks)
    if not modules.keys() - {"session_tests"}:
        return "fork"
    import torch

    torch.set_num_threads(1)  # a pool of threads here would not outlive a fork
    loaded = [importlib.import_module(module) for module in (*modules, "torch._dynamo", "transformers")]
    if any(module.__name__ == "session_steps" for module in loaded):
        steps = importlib.import_module("session_steps")
        from gpu_cases import engine_strategies

        from draftworks.config.strategies import resolve_strategy

        for name in engine_strategies():
            resolve_strategy(name).load_factory()
        if any(task.name != "ceilings" for part in parts for task in part.tasks):
            steps.cpu_target(settings.size)
    return "fork" if settings.device == "cpu" or can_fork() else "spawn"


def can_fork() -> bool:
    """Whether a forked process can use the GPU: not if something here has asked the driver already."""
    process = multiprocessing.get_context("fork").Process(target=use_gpu)
    process.start()
    process.join(60)
    return process.exitcode == 0


def use_gpu() -> None:
    import torch

    torch.zeros(1, device="cuda")


if __name__ == "__main__":
    typer.run(main)
