"""`python -m draftworks.programs.regenerate FILE`: let the target answer conversations."""

from __future__ import annotations

from typing import Any

from draftworks.capture.engine import load_engine
from draftworks.capture.regenerate import RegenerateProgress, capture_spec, regenerate
from draftworks.data.chat import ChatTokenizer
from draftworks.programs.process_group import resolve_device
from draftworks.programs.program import ProgramContext, run_program
from draftworks.runs import RegenerateRun


def answer(run: RegenerateRun, ctx: ProgramContext) -> dict[str, Any]:
    """Answer every conversation with the target; what an interrupted run finished is kept."""
    resolve_device(run.device)
    summary = regenerate(
        run,
        engine=lambda: load_engine(run.target, capture_spec(run)),
        chat=ChatTokenizer.load(run.target),
        progress=lambda now: ctx.progress(_line(now)),
    )
    return {
        **summary.tokens,
        "conversations": summary.conversations,
        "resumed": summary.resumed,
        "dropped": len(summary.dropped),
        "generated_tokens": summary.generated_tokens,
        "tokens_per_second": round(summary.generated_tokens / summary.seconds) if summary.seconds else 0,
    }


def _line(now: RegenerateProgress) -> dict[str, float | int | str]:
    eta = "?" if now.eta_s is None else f"{now.eta_s:.0f}s"
    return {"conversations": f"{now.done}/{now.conversations}", "tokens/s": round(now.tokens_per_s), "eta": eta}


if __name__ == "__main__":
    run_program(RegenerateRun, answer)
