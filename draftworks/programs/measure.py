"""`python -m draftworks.programs.measure FILE`: answer a few prompts and capture the answers, to know what a plan cannot."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftworks.capture.answers.answer_sets import open_kept_answers, read_asked
from draftworks.capture.answers.dialogue import Answerer, EngineAnswerer, build_token_rows
from draftworks.capture.answers.regenerate import find_max_sample_length, regenerate_with
from draftworks.capture.batch_notes import Progress
from draftworks.capture.engine import EnginePlace, TargetEngine, load_engine
from draftworks.capture.session import capture_missing
from draftworks.config.run_files import CaptureRun, MeasureRun, StoreSpec
from draftworks.data.chat import ChatTokenizer
from draftworks.data.tokenized import TokenRow
from draftworks.distributed.collectives import open_process_group
from draftworks.drafts.target_parts import TargetParts
from draftworks.planning.kept_answers import measure_records
from draftworks.planning.measured import MeasuredSample, Speed, add_unfinished, save_sample
from draftworks.programs.assembly import temporary_engine_folder
from draftworks.programs.program import ProgramContext, run_program
from draftworks.storage.identity import LayerTap

FIRST_CAPTURED = 4
"""Samples that warm an engine up."""
CAPTURE_SHARE = 0.25
"""Of the time for answers that captures may take in addition."""


class TimeIsUpError(Exception):
    """Ends the answering of a sample. What is answered is kept."""


@dataclass
class Stopwatch:
    """Reports progress, remembers it, and raises `TimeIsUpError` once answers have taken so many seconds."""

    ctx: ProgramContext
    limit_s: float
    last: Progress | None = field(default=None)

    def __call__(self, now: Progress) -> None:
        self.last = now
        self.ctx.report_progress(now.summarize())
        if now.seconds > self.limit_s:
            raise TimeIsUpError


@dataclass(frozen=True)
class Answered:
    """Records of the conversations that are answered, with their rows; `speed` counts answers that were begun too."""

    records: list[dict[str, Any]]
    rows: list[TokenRow]
    asked: int
    speed: Speed | None


def measure(run: MeasureRun, ctx: ProgramContext) -> dict[str, Any]:
    """Answer sampled prompts and capture the answers for about a minute, and store lengths and speeds. One process."""
    began = time.monotonic()
    ctx.log(f"measuring for about {run.limit_s:.0f} s: loading the target's engine")
    chat = ChatTokenizer.load(run.target, run.responses.thinking)
    with (
        open_process_group(run.capture.device) as device,
        temporary_engine_folder(run.out / "engine") as folder,
        ExitStack() as closing,
    ):
        engine = load_engine(run.target, run.capture, device, _make_place(run, folder))
        closing.callback(engine.close)
        answerer = _make_answerer(run, engine, chat)
        closing.callback(answerer.close)
        start_s = time.monotonic() - began
        answered = _answer(run, answerer, chat, ctx)
        ctx.log(f"answered {len(answered.records)} of {answered.asked} prompts: capturing their features")
        captured = _capture(run, engine, answered.rows)
    made = 0.0 if answered.speed is None else answered.speed.tokens / answered.asked
    most = float(min(run.responses.max_new_tokens, find_max_sample_length(run)))
    found = MeasuredSample(
        identity=run.identity,
        made_at=time.time(),
        asked=answered.asked,
        finished=len(answered.records),
        size=add_unfinished(
            measure_records(answered.records), len(answered.records) / answered.asked, made, run.prompt_tokens, most
        ),
        start_s=start_s,
        answers=answered.speed,
        capture=captured,
    )
    save_sample(run.record, found)
    return {"asked": found.asked, "finished": found.finished}


def _make_place(run: MeasureRun, folder: Path) -> EnginePlace:
    return EnginePlace(
        folder=folder,
        taps=tuple(map(LayerTap, run.taps)),
        head=lambda: TargetParts.load(run.target).head,
        embedding=lambda: TargetParts.load(run.target).embedding,
        sglang=run.sglang,
        vllm=run.vllm,
        longest=find_max_sample_length(run),
    )


def _make_answerer(run: MeasureRun, engine: TargetEngine, chat: ChatTokenizer) -> Answerer:
    if not run.responses.endpoint:
        return EngineAnswerer(engine, run.responses, chat, find_max_sample_length(run))
    from draftworks.capture.answers.endpoint import EndpointAnswerer  # httpx, which an engine does not need

    return EndpointAnswerer(run.responses, run.target, chat, find_max_sample_length(run), os.environ)


def _answer(run: MeasureRun, answerer: Answerer, chat: ChatTokenizer, ctx: ProgramContext) -> Answered:
    watch = Stopwatch(ctx, run.limit_s)
    try:
        regenerate_with(run, lambda: answerer, chat, progress=watch)
    except TimeIsUpError:
        ctx.log("time is up")
    asked = list(read_asked(run))
    with open_kept_answers(run) as kept:
        records = {each.id: kept[each.id] for each in asked if each.id in kept}
    answered = {name: record for name, record in records.items() if "ids" in record}
    rows = [row for each in asked if each.id in answered for row in build_token_rows(answered[each.id], each)]
    last = watch.last
    speed = None if last is None or not last.tokens or not last.seconds else Speed(float(last.tokens), last.seconds)
    return Answered(list(answered.values()), rows, len(asked), speed)


def _capture(run: MeasureRun, engine: TargetEngine, rows: list[TokenRow]) -> Speed | None:
    """Capture rows, and return the speed but for the first ones, which warm the engine up; features are thrown away.

    As many follow the first as these allow to expect in a share of the time.
    """
    first, rest = rows[:FIRST_CAPTURED], rows[FIRST_CAPTURED:]
    if not first:
        return None
    with tempfile.TemporaryDirectory(dir=run.out) as scratch:
        warmed = _capture_rows(run, engine, first, Path(scratch))
        room = int(CAPTURE_SHARE * run.limit_s / warmed.seconds * len(first))
        if not rest or not room:
            return warmed
        return _capture_rows(run, engine, rest[:room], Path(scratch))


def _capture_rows(run: MeasureRun, engine: TargetEngine, rows: list[TokenRow], scratch: Path) -> Speed:
    asked = CaptureRun(
        out=run.out,
        target=run.target,
        tokens=run.out,
        taps=run.taps,
        capture=run.capture.as_plain(),
        store=StoreSpec(root=scratch),
        sglang=run.sglang,
        vllm=run.vllm,
    )
    began = time.monotonic()
    capture_missing(asked, lambda: engine, rows)
    return Speed(float(sum(len(row.input_ids) for row in rows)), time.monotonic() - began)


if __name__ == "__main__":
    run_program(MeasureRun, measure)
