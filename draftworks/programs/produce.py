"""`python -m draftworks.programs.produce FILE`: capture features while a training uses them, in either order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from draftworks.capture.engine import TargetEngine, load_engine
from draftworks.capture.probe.probe import EngineProbe
from draftworks.capture.session import Confirmation
from draftworks.config.run_files import ArrivalSource, ProduceRun
from draftworks.data.arriving_rows import DatasetReader, IteratorReader, RowReader
from draftworks.data.chat import ChatTokenizer
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import open_process_group
from draftworks.distributed.stop_signals import defer_stop
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store_to_write
from draftworks.programs.assembly import make_engine_place, open_job_servers, temporary_engine_folder
from draftworks.programs.program import ProgramContext, run_program
from draftworks.storage.files import publish_json
from draftworks.storage.words import format_count
from draftworks.stream.arrival_producer import ProducerParts
from draftworks.stream.capture_worker import CaptureWorker, PlannedOrder, WorkerSummary
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import Watermark
from draftworks.stream.row_log import LoggedSource, RowLog, SourceFeeder
from draftworks.stream.stream_rounds import StreamRounds
from draftworks.stream.training_stream import open_controller


def produce(run: ProduceRun, ctx: ProgramContext) -> dict[str, Any]:
    """Capture a stream's features, in the order of its steps or as samples come, until the trainer has done the last one.

    Ranks are workers of their own, and each writes its figures into `run.out`. SIGTERM and SIGINT end a worker after its
    current batch.
    """
    tokens = TokenizedSet.open(run.tokens)
    capture = run.as_capture()
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
        if run.source is not None:
            parts = _ArrivalParts(run, controller, store, load, confirm)
            done = parts.produce(ctx.rank, lambda: bool(stop.signum))
        else:
            rounds = StreamRounds(
                *(read_feature_set(run.features).refs, tokens.sample_ids, run.streams, run.steps),
                *(run.stream, controller),
            )
            current = rounds.open(rounds.read_left_out())
            order = PlannedOrder(current, store, tokens, run.capture.batch_tokens, rounds.watch(current))
            done = CaptureWorker(name, capture, order, store, load, lambda: bool(stop.signum), confirm).run()
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


@dataclass(frozen=True)
class _ArrivalParts:
    """What a producer of a stream in arrival order is made of."""

    run: ProduceRun
    controller: DataFlowController
    store: KeyedFeatureStore
    load_engine: Callable[[], TargetEngine]
    confirm: Confirmation | None

    def produce(self, rank: int, should_stop: Callable[[], bool]) -> WorkerSummary:
        """Work until the trainer needs no more, or `should_stop`. Rank 0 reads the source.

        Raises:
            DraftworksError: the source cannot be read, or as `CaptureWorker.run`.
        """
        run, source = self.run, self.run.source
        assert source is not None
        chat = ChatTokenizer.load(run.target, source.responses.thinking)
        rows = RowLog(source.rows)
        logged = LoggedSource(
            *(rows, chat, source.responses, source.max_length, source.data.only_last_turn, run.capture.batch_tokens)
        )
        parts = ProducerParts(
            source=logged,
            capture=run.as_capture(),
            streams=run.streams,
            load_engine=self.load_engine,
            confirm=self.confirm,
        )
        settings = run.stream.settings
        producer = parts.make_producer(
            *(self.controller, self.store, Watermark(**settings.watermark.model_dump()), run.steps.global_batch_size),
            *(run.worker, settings.timeout_s),
        )
        to_end = bool(settings.until and settings.until.source)
        feeder = SourceFeeder(
            *(lambda state, is_new: _open_reader(source, state, is_new, to_end), rows, logged, self.controller),
            *(producer.task, producer.fact, source.data.held_out_share, source.data.max_rejected_share),
        )
        with feeder.feeding(to_end) if rank == 0 else nullcontext():
            done = producer.make_worker(rank, should_stop, feeder.require_sound).run()
        producer.free_rest()
        return done


def _open_reader(source: ArrivalSource, state: str | None, is_new: bool, to_end: bool) -> RowReader:
    if source.dataset is not None:
        return DatasetReader(source.dataset, source.root, state, to_end)
    assert source.iterator is not None
    return IteratorReader(source.iterator, state, is_new)


if __name__ == "__main__":
    run_program(ProduceRun, produce)
