"""`python -m draftworks.programs.regenerate FILE`: let the target answer conversations."""

from __future__ import annotations

from typing import Any

from draftworks.capture.answers import capture_spec
from draftworks.capture.engine import load_engine
from draftworks.capture.regenerate import regenerate
from draftworks.data.chat import ChatTokenizer
from draftworks.programs.process_group import resolve_device
from draftworks.programs.program import ProgramContext, run_program
from draftworks.runs import RegenerateRun


def answer(run: RegenerateRun, ctx: ProgramContext) -> dict[str, Any]:
    """Answer every conversation with the target; what an interrupted run finished is kept."""
    device = resolve_device(run.device)
    summary = regenerate(
        run,
        engine=lambda: load_engine(run.target, capture_spec(run), device),
        chat=ChatTokenizer.load(run.target),
        progress=lambda now: ctx.progress(now.line()),
    )
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
