"""`python -m draftworks.programs.serve FILE`: rung 6, the acceptance of an exported draft in a live server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftworks.capture.batch_notes import Progress
from draftworks.config.decoding import GREEDY, Decoding
from draftworks.config.run_files import ServeRun
from draftworks.data.chat import ChatTokenizer
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import resolve_device
from draftworks.errors import DataError
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.loop import current_timing_context
from draftworks.evaluation.ladder.server_acceptance import (
    SERVER_METRIC,
    RungAgreement,
    ServerMeasurement,
    ServerPrompt,
    ask_server,
    build_server_prompts,
    compare_with_rung,
    require_same_target,
    select_first_answers,
)
from draftworks.evaluation.ladder.statistics import Resampling, summarize_acceptance
from draftworks.evaluation.report.comparison import read_loop, read_walk
from draftworks.evaluation.report.served import ENGINES
from draftworks.programs.draft_servers import DraftServer, open_draft_server
from draftworks.programs.program import ProgramContext, run_program
from draftworks.servers.client import Counters, Sampling, SpeculatedAnswer
from draftworks.storage.files import publish_json
from draftworks.storage.identity import digest

RESULT = "serving.json"
SCHEMA_VERSION = 1


def measure_server(run: ServeRun, ctx: ProgramContext) -> dict[str, Any]:
    """Measure in every server of a run, one after another; what is published is of all of them.

    Raises:
        As `measure_one`.
    """
    first, *others = [measure_one(each, ctx) for each in run.list_runs()]
    publish_json(run.out / RESULT, {**first, **({"others": others} if others else {})})
    shown = [_without_prompts(each) for each in (first, *others)]
    return {**shown[0], **({"others": shown[1:]} if others else {})}


def measure_one(run: ServeRun, ctx: ProgramContext) -> dict[str, Any]:
    """Answer the eval set's prompts by speculative decoding, and compare with the walk over the same answers.

    Sampled answers are compared with rung 4 of the same decoding, if the report has it.

    Raises:
        ConfigError: as `open_draft_server`.
        EngineError: the same, or a running server is of another target.
        DataError: the eval set has no prompt.
    """
    stop_ids = ChatTokenizer.load(run.target).eos_ids
    limits = DecodingLimits(run.max_new_tokens, stop_ids)
    asked = build_server_prompts(TokenizedSet.open(run.tokens), run.serving.prompts, limits, run.max_length)
    if not asked:
        raise DataError(f"{run.tokens}: expected samples with a prompt before their answer, found none to ask a server")
    decodings = [Decoding.parse(suffix) for suffix in run.decodings]
    with open_draft_server(run, ctx) as server:
        ctx.log(f"{ENGINES[run.engine]} is ready: {len(asked)} answers, {run.serving.concurrency} at a time")
        questioner = _Questioner(server, run, ctx, stop_ids)
        greedy = questioner.ask(asked, GREEDY)
        if run.url is not None:
            require_same_target(asked, greedy.served, f"{ENGINES[run.engine]} at {run.url}")
        if decodings and not server.samples:
            ctx.log(f"{ENGINES[run.engine]} does not verify by the temperature on a CPU: nothing is sampled there")
            decodings = []
        sampled = [questioner.ask(select_first_answers(asked), decoding) for decoding in decodings]
    resampling = Resampling(run.confidence, run.resamples)
    compared = compare_with_rung(greedy.served.prompts, read_walk(run.report), run.serving.tolerance, resampling)
    ctx.log(_format_result(greedy, compared))
    return {
        "schema_version": SCHEMA_VERSION,
        "metric": f"eval/{SERVER_METRIC}",
        "rung": 6,
        **greedy.to_json(resampling),
        "walk": compared.to_json(),
        "algorithm": server.algorithm,
        "compute_dtype": run.serving.compute_dtype,
        "concurrency": run.serving.concurrency,
        "occasion": current_timing_context(resolve_device(run.serving.device)).to_json(),
        "engine": run.engine,
        **({} if run.url is None else {"url": run.url, "draft_compared": server.compared}),
        "sampled": [_judge_sampled(one, run, ctx, resampling) for one in sampled],
    }


def _without_prompts(result: dict[str, Any]) -> dict[str, Any]:
    """Return figures without those of single prompts."""
    kept = {name: value for name, value in result.items() if name != "prompts"}
    return kept | ({"sampled": list(map(_without_prompts, kept["sampled"]))} if "sampled" in kept else {})


@dataclass(frozen=True)
class _ServerRun:
    """The answers of a server by one decoding, and its counters.

    Attributes:
        seconds: time of all answers, several at a time, with prefill.
        counters: the server's own, over the same time.
        accept_length: tokens per pass according to the server; None if it has no value.
    """

    decoding: Decoding
    served: ServerMeasurement
    seconds: float
    counters: Counters
    accept_length: float | None
    version: str

    def to_json(self, resampling: Resampling) -> dict[str, Any]:
        served = self.served
        return {
            "acceptance": summarize_acceptance(served.prompts, resampling).to_json(),
            "prompts": {one.sample_id: list(one.histogram) for one in served.prompts},
            "answers": served.answers,
            "same_answers": served.identical_answers,
            "tokens": served.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(served.tokens / self.seconds, 2),
            "server": {
                "version": self.version,
                "passes": self.counters.passes,
                "tokens": self.counters.tokens,
                "avg_spec_accept_length": self.accept_length,
            },
        }


class _AnswerProgress:
    """Reports the progress of the answers."""

    def __init__(self, ctx: ProgramContext, total: int, started: float) -> None:
        self._ctx = ctx
        self._total = total
        self._started = started
        self._done = self._tokens = 0

    def add(self, answer: SpeculatedAnswer) -> None:
        """Count an answer and report the progress."""
        self._done += 1
        self._tokens += len(answer.output_ids)
        seconds = time.monotonic() - self._started
        progress = Progress("answers", self._done, self._total, self._done / self._total, self._tokens, seconds)
        self._ctx.report_progress(progress.summarize(), force=self._done == self._total)


@dataclass(frozen=True)
class _Questioner:
    """Asks a server the eval set's prompts."""

    server: DraftServer
    run: ServeRun
    ctx: ProgramContext
    stop_ids: tuple[int, ...]

    def ask(self, asked: Sequence[ServerPrompt], decoding: Decoding) -> _ServerRun:
        def answer(prompt: ServerPrompt) -> SpeculatedAnswer:
            return self.server.answer(prompt.prompt, self._choose_sampling(prompt, decoding))

        before, started = self.server.get_counters(), time.monotonic()
        if decoding != GREEDY:
            self.ctx.log(f"{len(asked)} answers at {decoding.describe()}, accepted by the rule {decoding.rule}")
        progress = _AnswerProgress(self.ctx, len(asked), started)
        served = ask_server(asked, answer, self.run.serving.concurrency, progress.add)
        seconds = time.monotonic() - started
        counted = self.server.get_counters().subtract(before)
        return _ServerRun(decoding, served, seconds, counted, self.server.read_accept_length(), self.server.version)

    def _choose_sampling(self, prompt: ServerPrompt, decoding: Decoding) -> Sampling:
        seed = int(digest([prompt.sample_id])[:7], 16) if decoding.temperature else None
        cuts = (decoding.top_k, decoding.top_p)
        return Sampling(prompt.max_new_tokens, self.stop_ids, decoding.temperature, *cuts, seed)


def _judge_sampled(live: _ServerRun, run: ServeRun, ctx: ProgramContext, resampling: Resampling) -> dict[str, Any]:
    """Return the figures of sampled answers, beside rung 4 of the same decoding if the report has it."""
    loop = read_loop(run.report, live.decoding)
    compared = compare_with_rung(live.served.prompts, loop, run.serving.tolerance, resampling) if loop else None
    said = "the report has no rung 4 of this decoding (evaluation.loop)"
    if compared is not None:
        said = f"{compared.paired.difference:+.3f} accepted tokens per pass against rung 4 on {compared.paired.prompts} samples"
    ctx.log(f"{live.decoding.suffix}: {live.served.tokens} tokens in {live.served.passes} passes (rung 6); {said}")
    return {
        "metric": f"eval/{SERVER_METRIC}_{live.decoding.suffix}",
        "decoding": live.decoding.to_json(),
        **live.to_json(resampling),
        "loop": None if compared is None else compared.to_json(),
    }


def _format_result(live: _ServerRun, compared: RungAgreement) -> str:
    served, paired = live.served, compared.paired
    return (
        f"{served.tokens} tokens in {served.passes} passes (rung 6), {served.identical_answers} of {served.answers} "
        f"answers are the eval set's own; {paired.difference:+.3f} accepted tokens per pass against the walk (rung 3) on "
        f"{paired.prompts} samples, {compared.equal_samples} of them equal count for count"
    )


if __name__ == "__main__":
    run_program(ServeRun, measure_server)
