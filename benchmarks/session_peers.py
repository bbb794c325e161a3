"""Work of a session on a GPU beside its peers: our training steps and theirs in turns, on the same sizes and batch."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_cases import SHAPES, made_up_draft, made_up_samples, made_up_target, names_of, select_options
from gpu_steps import CONTEXT, trainer_core
from gpu_turns import Side, Step, serve_turns
from session_rows import RowFile
from session_steps import Ready
from session_tasks import Settings, Task

from draftworks.training.backend import ensure_process_group

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"SpecForge": "specforge_gpu_step.py", "speculators": "speculators_gpu_step.py"}
ENVIRONMENTS = {"SpecForge": ".venv-specforge", "speculators": ".venv-speculators"}
TURNS, STEPS = 2, 3


@dataclass(frozen=True)
class Request:
    """What a side trains on.

    Attributes:
        options: of the strategy, as ours resolves them.
    """

    strategy: str
    device: str
    size: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    lengths: tuple[int, ...]
    options: dict[str, Any]
    loss_share: float = 7 / 8


def make_request(strategy: str, settings: Settings) -> Request:
    shape = SHAPES[settings.size]
    options = select_options(strategy, shape).model_dump(mode="json")
    sizes = (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.vocab)
    named = (strategy, settings.device, settings.size)
    return Request(*named, *sizes, shape.options["draft_vocab_size"], settings.lengths, options)


def race(task: Task, settings: Settings, rows: RowFile, ready: Ready) -> None:
    """Run our steps and a peer's in turns; `arguments` is the strategy and the peer's name.

    The peer warms up before ours are on the device: its memory then is a row of its own.
    """
    name, rival = task.arguments
    given = json.dumps(asdict(make_request(name, settings)))
    theirs = start_peer(rival, given, settings)
    ours = start_side([sys.executable, __file__, given], {"PYTHONPATH": str(ROOT)})

    def tell(key: str, side: str, **figures: Any) -> None:
        rows.add(task.part, task.name, key=key, strategy=name, rival=rival, side=side, **figures)

    try:
        theirs.wait()
        ours.wait()
        ready()
        tell("alone", rival, **theirs.start())
        ours.start()
        for turn in range(TURNS):
            for each in (ours, theirs) if turn % 2 else (theirs, ours):
                each.run(STEPS)
        for side, each in (("ours", ours), (rival, theirs)):
            middle = statistics.median(each.ms)
            samples = len(settings.lengths) / middle * 1e3
            tell(f"{side} in turns", side, ms=middle, samples_per_s=samples, peak_gb=each.peak_gb, all_ms=each.ms)
    finally:
        for each in (ours, theirs):
            each.close()


def start_peer(rival: str, given: str, settings: Settings) -> Side:
    """Start a peer's process, in its own environment if that is here, else in this Python with the folder of wheels."""
    own = ROOT / ENVIRONMENTS[rival] / "bin" / "python"
    python = str(own) if own.exists() and settings.wheels is None else sys.executable
    more = {} if settings.wheels is None else {"PYTHONPATH": str(settings.wheels)}
    if settings.device == "cpu":
        more["TORCHDYNAMO_DISABLE"] = "1"
    return start_side([python, str(ROOT / "tools" / SCRIPTS[rival]), given], more)


def start_side(command: list[str], more: dict[str, str]) -> Side:
    inherited = dict(os.environ)
    if "PYTHONPATH" in more:
        more = {**more, "PYTHONPATH": os.pathsep.join(filter(None, [more["PYTHONPATH"], inherited.get("PYTHONPATH")]))}
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Side(command, {**inherited, **settings, **more})


def prepare_ours(request: Request) -> Callable[[], Step]:
    """Build our draft and batch on the CPU; what is returned takes them to the device."""
    device, shape = torch.device(request.device), SHAPES[request.size]
    draft = made_up_draft(request.strategy, shape, made_up_target(shape, "cpu", torch.bfloat16))
    samples = made_up_samples(draft, shape, request.lengths, torch.bfloat16)
    packed = draft.pack(samples, names_of(samples))

    def make() -> Step:
        core = trainer_core(draft, device, "bfloat16")
        batch = packed.to(device)
        return lambda: core.train_step(batch, CONTEXT)

    return make


if __name__ == "__main__":
    wanted = Request(**json.loads(sys.argv[1]))
    with ensure_process_group(torch.device(wanted.device)):
        serve_turns(lambda: prepare_ours(wanted), wanted.device)
