"""`python -m draftworks.programs.capture FILE`: capture the features that the store lacks, and report what it has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

from draftworks.capture.engine import TargetEngine, load_engine
from draftworks.capture.probe.probe import EngineProbe, ProbeReport
from draftworks.capture.session import CaptureSummary, capture_missing, write_manifest
from draftworks.capture.verify import recheck
from draftworks.config.run_files import WORKER_FIGURES, CaptureRun
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import gather_from_ranks, open_process_group
from draftworks.features.manifest import FeatureSetManifest
from draftworks.features.open_store import open_store
from draftworks.programs.assembly import make_engine_place, open_job_servers, temporary_engine_folder
from draftworks.programs.program import ProgramContext, run_program
from draftworks.storage.files import publish_json


def capture(run: CaptureRun, ctx: ProgramContext) -> dict[str, Any]:
    """Capture the hidden states of a tokenized set. Ranks share the samples; each writes its own shards.

    Several jobs share the work by claims on the store. All but job 0 end when there is nothing left to capture; job 0 then
    writes the feature set.
    """
    tokens = TokenizedSet.open(run.tokens)
    started = time.monotonic()
    with (
        open_process_group(run.capture.device) as device,
        temporary_engine_folder(run.out / f"engine-{ctx.rank}") as folder,
        open_job_servers(run.capture, run.out, ctx) as servers,
        ExitStack() as closing,
    ):
        probe = EngineProbe(run, tokens)

        @cache
        def load_and_probe() -> tuple[TargetEngine, ProbeReport]:
            """Load the engine, once and only if it is needed, and probe it before anything is stored."""
            with ctx.doing("loading the target"):
                place = make_engine_place(run, ctx, folder, tokens, servers)
                loaded = load_engine(run.target, run.capture, device, place)
            closing.callback(loaded.close)
            with ctx.doing("comparing the engine with the target's own files"):
                compared = probe.compare(loaded)
            loaded.share_with_job()
            return loaded, compared

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
        figures = _add_up(summaries)
        if run.worker:
            publish_json(run.out / WORKER_FIGURES, figures)
            return figures
        manifest = write_manifest(run, tokens, [each for summary in summaries for each in summary.failed])
        store = open_store(run.store)
        engine, report = load_and_probe()
        with ctx.doing("capturing some stored samples again and comparing them"):
            check = recheck(engine, store, manifest.refs, tokens)
        store.close()
    return {
        **describe_set(manifest),
        **figures,
        "failed_samples": len(tokens) - len(manifest.refs),
        "seconds": round(time.monotonic() - started, 2),
        "verification": check.to_json(),
        "probe": report.to_json(),
    }


def describe_set(manifest: FeatureSetManifest) -> dict[str, Any]:
    """Return the figures of a feature set for the report of the program that wrote it."""
    return {
        "data_version": manifest.data_version,
        "samples": len(manifest.refs),
        "tokens": manifest.tokens,
        "streams": list(manifest.streams),
        "stream_versions": manifest.stream_versions,
        "bytes": manifest.nbytes,
        "bytes_per_token": round(manifest.nbytes / manifest.tokens, 1),
    }


def _add_up(summaries: Sequence[CaptureSummary]) -> dict[str, int]:
    """Return the figures of what the ranks captured; those of several jobs add up too."""
    tokens, seconds = sum(each.tokens for each in summaries), max(each.seconds for each in summaries)
    return {
        "captured_samples": sum(each.captured for each in summaries),
        "captured_bytes": sum(each.nbytes for each in summaries),
        "tokens_per_second": round(tokens / seconds) if tokens else 0,
    }


if __name__ == "__main__":
    run_program(CaptureRun, capture)
