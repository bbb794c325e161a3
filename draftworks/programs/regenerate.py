"""`python -m draftworks.programs.regenerate FILE`: generate the target's answers to conversations."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftworks.capture.answers.answerers import Answerer, EngineAnswerer
from draftworks.capture.answers.endpoint import EndpointAnswerer
from draftworks.capture.answers.regenerate import find_max_sample_length, help_to_regenerate, regenerate_with
from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.config.run_files import WORKER_FIGURES, RegenerateRun
from draftworks.data.chat import ChatTokenizer
from draftworks.distributed.process_group import resolve_device
from draftworks.programs.assembly import temporary_engine_folder
from draftworks.programs.program import ProgramContext, run_program
from draftworks.storage.atomic import publish_json


def regenerate(run: RegenerateRun, ctx: ProgramContext) -> dict[str, Any]:
    """Answer every conversation with the target; answers that an interrupted run finished are kept.

    Several jobs may share the conversations; all but job 0 end when there are none left to answer.
    """
    chat = ChatTokenizer.load(run.target, run.responses.thinking)
    with temporary_engine_folder(run.out / "engine") as folder, ExitStack() as closing:

        def answerer() -> Answerer:
            made = (
                _make_endpoint_answerer(run, chat)
                if run.responses.endpoint
                else _make_engine_answerer(run, chat, folder)
            )
            closing.callback(made.close)
            return made

        if run.worker:
            helped = help_to_regenerate(run, answerer, chat, progress=lambda now: ctx.report_progress(now.summarize()))
            figures = _make_figures(helped.generated_tokens, helped.seconds)
            publish_json(run.out / WORKER_FIGURES, figures)
            return figures
        summary = regenerate_with(run, answerer, chat, progress=lambda now: ctx.report_progress(now.summarize()))
    return {
        **summary.tokens,
        "conversations": summary.conversations,
        "resumed": summary.resumed,
        "dropped": len(summary.missing.rejected),
        **_make_figures(summary.generated_tokens, summary.seconds),
    }


def _make_figures(generated_tokens: int, seconds: float) -> dict[str, int]:
    """Return the figures that add up over several jobs."""
    rate = round(generated_tokens / seconds) if seconds else 0
    return {"generated_tokens": generated_tokens, "tokens_per_second": rate}


def _make_engine_answerer(run: RegenerateRun, chat: ChatTokenizer, folder: Path) -> Answerer:
    place = EnginePlace(folder, sglang=run.sglang, longest=find_max_sample_length(run))
    engine = load_engine(run.target, run.capture, resolve_device(run.capture.device), place)
    return EngineAnswerer(engine, run.responses, chat, find_max_sample_length(run))


def _make_endpoint_answerer(run: RegenerateRun, chat: ChatTokenizer) -> Answerer:
    return EndpointAnswerer(run.responses, run.target, chat, find_max_sample_length(run), os.environ)


if __name__ == "__main__":
    run_program(RegenerateRun, regenerate)
