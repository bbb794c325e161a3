"""`python -m draftworks.programs.regenerate FILE`: let the target answer conversations."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from draftworks.capture.answers import capture_spec
from draftworks.capture.engine import EnginePlace, TargetEngine, load_engine
from draftworks.capture.regenerate import regenerate
from draftworks.data.chat import ChatTokenizer
from draftworks.programs.engine_folder import engine_folder
from draftworks.programs.process_group import resolve_device
from draftworks.programs.program import ProgramContext, run_program
from draftworks.runs import RegenerateRun


def answer(run: RegenerateRun, ctx: ProgramContext) -> dict[str, Any]:
    """Answer every conversation with the target; what an interrupted run finished is kept."""
    device = resolve_device(run.device)
    with engine_folder(run.out / "engine") as folder, ExitStack() as closing:

        def engine() -> TargetEngine:
            place = EnginePlace(folder, sglang=run.sglang)
            loaded = load_engine(run.target, capture_spec(run), device, place)
            closing.callback(loaded.close)
            return loaded

        summary = regenerate(run, engine, ChatTokenizer.load(run.target), progress=lambda now: ctx.progress(now.line()))
    return {
        **summary.tokens,
        "conversations": summary.conversations,
        "resumed": summary.resumed,
        "dropped": len(summary.losses.rejected),
        "generated_tokens": summary.generated_tokens,
        "tokens_per_second": round(summary.generated_tokens / summary.seconds) if summary.seconds else 0,
    }


if __name__ == "__main__":
    run_program(RegenerateRun, answer)
