"""`python -m draftworks.programs.serve FILE`: rung 6, the acceptance of an exported draft in a live SGLang server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.capture.batch_notes import Progress
from draftworks.config.run_files import ServeRun
from draftworks.data.chat import ChatTokenizer
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import resolve_device
from draftworks.errors import DataError, EngineError
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.loop import current_timing_context
from draftworks.evaluation.ladder.server_acceptance import (
    SERVER_METRIC,
    ServerMeasurement,
    ServerPrompt,
    WalkAgreement,
    ask_server,
    build_server_prompts,
    compare_with_walk,
)
from draftworks.evaluation.ladder.statistics import Resampling, summarize_acceptance
from draftworks.evaluation.report.comparison import read_walk
from draftworks.export.conventions import DRAFT_FOLDER
from draftworks.programs.program import ProgramContext, run_program
from draftworks.servers.client import Counters, GenerateRequest, SpeculatedAnswer
from draftworks.sglang.environment import require_cpu_speculation
from draftworks.sglang.server import ServerOptions, SGLangServer
from draftworks.sglang.speculation import (
    SpeculatingClient,
    Speculation,
    read_accept_length,
    read_verified_tokens,
    require_cpu_dtype,
)
from draftworks.storage.files import publish_json

RESULT = "serving.json"
SCHEMA_VERSION = 1
CPU_MEMORY_SHARE = 0.8
"""Upper limit, as a share of main memory; the number of tokens in the KV cache decides how much is used."""


def measure_server(run: ServeRun, ctx: ProgramContext) -> dict[str, Any]:
    """Answer the eval set's prompts by speculative decoding, and compare with the walk over the same answers.

    Raises:
        ConfigError: there is no SGLang, or it cannot speculate with this kind of draft on this machine.
        EngineError: the server does not start, or proposes another number of tokens than the walk.
        DataError: the eval set has no prompt.
    """
    device = resolve_device(run.serving.device).type
    speculation = Speculation.of_command(run.command, DRAFT_FOLDER, run.draft).with_draft_tokens(run.draft_tokens)
    speculation.require_supported(device)
    if device == "cpu":
        _require_cpu_support(run)
    stop_ids = ChatTokenizer.load(run.target).eos_ids
    limits = DecodingLimits(run.max_new_tokens, stop_ids)
    asked = build_server_prompts(TokenizedSet.open(run.tokens), run.serving.prompts, limits, run.max_length)
    if not asked:
        raise DataError(f"{run.tokens}: expected samples with a prompt before their answer, found none to ask a server")
    with _run_server(run, ctx, _make_server_options(run, device, speculation)) as client:
        live = _ask_all(client, run, ctx, asked, stop_ids)
    resampling = Resampling(run.confidence, run.resamples)
    compared = compare_with_walk(live.served.prompts, read_walk(run.report), run.serving.tolerance, resampling)
    ctx.log(_format_result(live, compared))
    result = {
        "schema_version": SCHEMA_VERSION,
        "metric": f"eval/{SERVER_METRIC}",
        "rung": 6,
        "acceptance": summarize_acceptance(live.served.prompts, resampling).to_json(),
        "prompts": {one.sample_id: list(one.histogram) for one in live.served.prompts},
        "walk": compared.to_json(),
        **live.to_json(),
        "algorithm": speculation.algorithm,
        "compute_dtype": run.serving.compute_dtype,
        "concurrency": run.serving.concurrency,
        "occasion": current_timing_context(resolve_device(run.serving.device)).to_json(),
    }
    publish_json(run.out / RESULT, result)
    return {name: value for name, value in result.items() if name != "prompts"}


@dataclass(frozen=True)
class _ServerRun:
    """The answers of a server, and its counters.

    Attributes:
        seconds: time of all answers, several at a time, with prefill.
        counters: the server's own, over the same time.
        accept_length: tokens per pass according to /server_info; None if it has no value.
    """

    served: ServerMeasurement
    seconds: float
    counters: Counters
    accept_length: float | None
    version: str

    def to_json(self) -> dict[str, Any]:
        return {
            "answers": self.served.answers,
            "same_answers": self.served.identical_answers,
            "tokens": self.served.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.served.tokens / self.seconds, 2),
            "server": {
                "version": self.version,
                "passes": self.counters.passes,
                "tokens": self.counters.tokens,
                "avg_spec_accept_length": self.accept_length,
            },
        }


@contextmanager
def _run_server(run: ServeRun, ctx: ProgramContext, options: ServerOptions) -> Iterator[SpeculatingClient]:
    """Run a server of our own, and stop it in any case."""
    sglang = run.sglang
    server = SGLangServer(Path(sglang.python), options, run.logs, sglang.start_timeout_s, sglang.grace_s)
    ctx.log(f"starting SGLang with {options.draft.algorithm if options.draft else 'no draft'}, its log is {server.log}")
    server.start()
    client = SpeculatingClient(server.url, sglang.request_timeout_s)
    try:
        yield client
    finally:
        server.stop()  # first: a closed client would not wake the threads that wait for an answer
        client.close()


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


def _ask_all(
    client: SpeculatingClient, run: ServeRun, ctx: ProgramContext, asked: list[ServerPrompt], stop_ids: tuple[int, ...]
) -> _ServerRun:
    info = client.get_raw_info()
    proposed = read_verified_tokens(info) - 1
    if proposed != run.draft_tokens:
        raise EngineError(
            f"SGLang proposes {proposed} tokens per pass, the walk that it is compared with {run.draft_tokens}: "
            "expected the same. Leave evaluation.draft_tokens out for a draft whose own config sets how many it proposes"
        )

    def answer(prompt: ServerPrompt):
        sampling = {"temperature": 0.0, "max_new_tokens": prompt.max_new_tokens, "stop_token_ids": list(stop_ids)}
        return client.answer(GenerateRequest(uuid.uuid4().hex, prompt.prompt, sampling))

    before, started = client.get_counters(), time.monotonic()
    progress = _AnswerProgress(ctx, len(asked), started)
    ctx.log(f"SGLang is ready: {len(asked)} answers, {run.serving.concurrency} at a time")
    served = ask_server(asked, answer, run.serving.concurrency, progress.add)
    seconds = time.monotonic() - started
    return _ServerRun(
        served,
        seconds,
        client.get_counters().subtract(before),
        read_accept_length(client.get_raw_info()),
        str(info.get("version")),
    )


def _make_server_options(run: ServeRun, device: str, speculation: Speculation) -> ServerOptions:
    server, on_gpu = run.serving.server, device == "cuda"
    return ServerOptions(
        model=run.target.model,
        revision=run.target.revision,
        tokenizer=run.target.tokenizer,
        context=run.target.context,
        dtype=run.serving.compute_dtype,
        device=device,
        layer_ids=(),
        spool=run.logs / "spool",
        tp_size=server.tp_size,
        dp_size=server.dp_size,
        mem_fraction=server.mem_fraction or (None if on_gpu else CPU_MEMORY_SHARE),
        max_total_tokens=server.max_total_tokens
        or (None if on_gpu else (run.serving.concurrency + 1) * 2 * run.target.context),
        extra=tuple(server.args),
        draft=speculation,
    )


def _require_cpu_support(run: ServeRun) -> None:
    require_cpu_dtype(run.serving.compute_dtype)
    require_cpu_speculation(Path(run.sglang.python))


def _format_result(live: _ServerRun, compared: WalkAgreement) -> str:
    served, paired = live.served, compared.paired
    return (
        f"{served.tokens} tokens in {served.passes} passes (rung 6), {served.identical_answers} of {served.answers} "
        f"answers are the eval set's own; {paired.difference:+.3f} accepted tokens per pass against the walk (rung 3) on "
        f"{paired.prompts} samples, {compared.equal_samples} of them equal count for count"
    )


if __name__ == "__main__":
    run_program(ServeRun, measure_server)
