"""`python -m draftworks.programs.produce FILE`: capture planned features while a training uses them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from draftworks.capture.engine import TargetEngine, load_engine
from draftworks.capture.probe.probe import EngineProbe
from draftworks.config.run_files import ProduceRun
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import open_process_group
from draftworks.distributed.stop_signals import defer_stop
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store_to_write
from draftworks.programs.assembly import make_engine_place, open_job_servers, temporary_engine_folder
from draftworks.programs.program import ProgramContext, run_program
from draftworks.storage.files import publish_json
from draftworks.storage.words import format_count
from draftworks.stream.capture_worker import CaptureWorker
from draftworks.stream.planned_order import PlannedOrder
from draftworks.stream.stream_rounds import StreamRounds
from draftworks.stream.training_stream import open_controller


def produce(run: ProduceRun, ctx: ProgramContext) -> dict[str, Any]:
    """Capture a stream's features in the order of its steps, until the trainer has done the last one.

    Ranks are workers of their own, and each writes its figures into `run.out`. SIGTERM and SIGINT end a worker after its
    current batch.
    """
    tokens = TokenizedSet.open(run.tokens)
    capture = run.as_capture()
    refs = read_feature_set(run.features).refs
    started = time.monotonic()
    with (
        open_process_group(run.capture.device) as device,
        temporary_engine_folder(run.out / f"engine-{ctx.rank}") as folder,
        open_job_servers(run.capture, run.out, ctx) as servers,
        defer_stop() as stop,
        ExitStack() as closing,
    ):
        store = open_store_to_write(run.stream.store, shard_bytes=run.capture.shard_mb << 20)
        closing.callback(store.close)
        controller = open_controller(run.stream)
        closing.callback(controller.close)
        rounds = StreamRounds(refs, tokens.sample_ids, run.streams, run.steps, run.stream, controller)
        current = rounds.open(rounds.read_left_out())

        probe = EngineProbe(capture, tokens)

        def load() -> TargetEngine:
            """Load the engine and compare it with the target's weights before anything is stored."""
            place = make_engine_place(capture, ctx, folder, tokens, servers)
            loaded = load_engine(run.target, run.capture, device, place)
            closing.callback(loaded.close)
            ctx.log(probe.compare(loaded).describe())
            loaded.share_with_job()
            return loaded

        name = f"{run.worker}-{ctx.rank}"
        confirm = probe.confirm if run.capture.server.external else None
        order = PlannedOrder(current, store, tokens, run.capture.batch_tokens, rounds.watch(current))
        worker = CaptureWorker(name, capture, order, store, load, lambda: bool(stop.signum), confirm)
        done = worker.run()
    seconds = time.monotonic() - started
    ctx.log(
        f"{name}: {format_count(done.captured, 'sample')} captured in {format_count(done.tasks, 'task')}, "
        f"{done.waited_s:.1f} of {seconds:.1f} s waiting"
    )
    report = {
        "tasks": done.tasks,
        "captured_samples": done.captured,
        "captured_tokens": done.tokens,
        "captured_bytes": done.nbytes,
        "waited_s": round(done.waited_s, 2),
        "seconds": round(seconds, 2),
    }
    publish_json(run.out / f"{name}.json", report)
    return report


if __name__ == "__main__":
    run_program(ProduceRun, produce)
