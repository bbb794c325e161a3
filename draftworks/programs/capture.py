"""`python -m draftworks.programs.capture FILE`: capture the features that the store lacks, and report what it has."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import cache
from typing import Any

from draftworks.capture.engine import TargetEngine, load_engine
from draftworks.capture.probe.probe import EngineProbe, ProbeReport
from draftworks.capture.recheck import recheck
from draftworks.capture.session import capture_missing, write_manifest
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import gather_from_ranks
from draftworks.distributed.process_group import open_process_group
from draftworks.features.open_store import open_store
from draftworks.programs.assembly import make_engine_place, temporary_engine_folder
from draftworks.programs.program import ProgramContext, run_program


def capture(run: CaptureRun, ctx: ProgramContext) -> dict[str, Any]:
    """Capture the hidden states of a tokenized set. Ranks share the samples; each writes its own shards."""
    tokens = TokenizedSet.open(run.tokens)
    started = time.monotonic()
    with (
        open_process_group(run.capture.device) as device,
        temporary_engine_folder(run.out / f"engine-{ctx.rank}") as folder,
        ExitStack() as closing,
    ):
        probe = EngineProbe(run, tokens)

        @cache
        def load_and_probe() -> tuple[TargetEngine, ProbeReport]:
            """Load the engine, once and only if it is needed, and probe it before anything is stored."""
            loaded = load_engine(run.target, run.capture, device, make_engine_place(run, ctx, folder, tokens))
            closing.callback(loaded.close)
            return loaded, probe.compare(loaded)

        summary = capture_missing(
            run,
            lambda: load_and_probe()[0],
            tokens,
            ctx.rank,
            ctx.world_size,
            progress=lambda now: ctx.report_progress(now.summarize()),
            confirm=probe.confirm if run.capture.server.external else None,
        )
        summaries = gather_from_ranks(summary)  # also the barrier before the manifest is written
        if not ctx.is_main:
            return {}
        manifest = write_manifest(run, tokens, [each for summary in summaries for each in summary.failed])
        store = open_store(run.store)
        engine, report = load_and_probe()
        check = recheck(engine, store, manifest.refs, tokens)
        store.close()
    captured_tokens = sum(each.tokens for each in summaries)
    return {
        "data_version": manifest.data_version,
        "samples": len(manifest.refs),
        "tokens": manifest.tokens,
        "streams": list(manifest.streams),
        "stream_versions": manifest.stream_versions,
        "bytes": manifest.nbytes,
        "bytes_per_token": round(manifest.nbytes / manifest.tokens, 1),
        "captured_samples": sum(each.captured for each in summaries),
        "failed_samples": len(tokens) - len(manifest.refs),
        "captured_bytes": sum(each.nbytes for each in summaries),
        "tokens_per_second": round(captured_tokens / max(each.seconds for each in summaries)) if captured_tokens else 0,
        "seconds": round(time.monotonic() - started, 2),
        "verification": check.to_json(),
        "probe": report.to_json(),
    }


if __name__ == "__main__":
    run_program(CaptureRun, capture)
