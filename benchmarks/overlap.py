"""How far an engine and what uses its features work at the same time, both paced to the same seconds for a batch.

    python benchmarks/overlap.py                    # 40 batches of 0.25 s

`streamed`: a producer captures a planned set into a shared folder, and a trainer takes its steps from there; control
plane, leases, acknowledgements and freeing are real, forward passes and optimizer steps are pauses. `stored`: a capture
into a local store whose `put` is as slow as the engine. The figure is the wall time over that of the slower alone: the
engine's pauses, or the trainer with all features ready. 2 is taking turns; the aim is at most 1.15.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import numpy as np
import torch
import typer
from torch import Tensor

from draftworks.capture.capture_plan import StreamPlan, make_refs
from draftworks.capture.engine import Generated, TargetEngine, find_backend, make_engine_identity
from draftworks.capture.session import capture_missing
from draftworks.config.capture import CaptureSpec
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import CaptureRun, StoreSpec, TargetFiles
from draftworks.data.tokenized import TokenRow
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.open_store import open_store
from draftworks.storage.identity import LayerTap
from draftworks.stream.capture_worker import CaptureWorker, PlannedOrder
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import Watermark
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.stream.stream_consumer import StreamConsumer
from draftworks.stream.stream_rounds import StreamRound
from draftworks.stream.streaming_plan import StreamingPlan, StreamOrder
from draftworks.stream.training_stream import AwaitedStore

HIDDEN, LENGTH, BATCH, VOCAB = 256, 64, 4, 1000
POLL_S = 0.005


class PacedEngine(TargetEngine):
    """Takes `seconds` for each batch, and gives made-up features."""

    backend = "hf"

    def __init__(self, capture: CaptureSpec, seconds: float) -> None:
        self.identity, self.last_hidden = make_engine_identity(capture), find_backend("hf").last_hidden
        self._seconds = seconds

    def capture(self, sequences: Sequence[Sequence[int]], taps: Sequence[LayerTap]) -> list[dict[str, Tensor]]:
        time.sleep(self._seconds)
        names = [*(tap.name for tap in taps), "last"]
        return [{name: torch.ones(len(ids), HIDDEN) for name in names} for ids in sequences]

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.ones(len(ids), VOCAB) for ids in sequences]

    def head_logits(self, last: Tensor) -> Tensor:
        return torch.ones(len(last), VOCAB)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: ResponseSpec,
        sample_ids: Sequence[str],
        max_total: int,
        turn: int = 0,
        end_ids: Collection[int] = (),
    ) -> list[Generated]:
        raise NotImplementedError


@dataclass(frozen=True)
class Case:
    """A set of `batches` global batches, whose engine takes `seconds` for each.

    Attributes:
        step_s: seconds of a streamed optimizer step; None for those of the engine.
        watermark_steps: how far the producer is ahead at most, in steps.
    """

    batches: int
    seconds: float
    folder: Path
    step_s: float | None = None
    watermark_steps: int = 8

    @property
    def alone_s(self) -> float:
        return self.batches * self.seconds

    def make_rows(self) -> list[TokenRow]:
        generator = np.random.default_rng(0)
        ids = [generator.integers(5, VOCAB, LENGTH).astype(np.int32) for _ in range(self.batches * BATCH)]
        return [TokenRow(f"s{number}", row, np.ones(LENGTH, np.bool_)) for number, row in enumerate(ids)]

    def make_run(self, kind: str) -> CaptureRun:
        target = TargetFiles(
            name="made-up", model="none", tokenizer="none", digest="0" * 16, tokenizer_digest="0" * 16, num_layers=8,
            hidden_size=HIDDEN, vocab_size=VOCAB, context=LENGTH,
        )  # fmt: skip
        capture = CaptureSpec(compute_dtype="float32", dtype="float32", device="cpu", batch_tokens=BATCH * LENGTH)
        store = StoreSpec.model_validate({"kind": kind, "root": self.folder / "store"})
        out = self.folder / "out"
        return CaptureRun(out=out, target=target, tokens=self.folder, taps=[2, 4], capture=capture, store=store)


def time_stored(case: Case) -> float:
    """Return the seconds of a capture into a store that takes as long for a batch as the engine."""
    run, rows, put = case.make_run("local"), case.make_rows(), LocalFeatureStore.put

    def put_slowly(self: LocalFeatureStore, ref, tensors):
        time.sleep(case.seconds / BATCH)
        return put(self, ref, tensors)

    with mock.patch.object(LocalFeatureStore, "put", put_slowly):
        started = time.perf_counter()
        capture_missing(run, lambda: PacedEngine(run.capture, case.seconds), rows)
        return time.perf_counter() - started


@dataclass(frozen=True)
class Stream:
    """Plan, control plane, store and producer of a case."""

    plan: StreamingPlan
    controller: DataFlowController
    store: KeyedFeatureStore
    worker: CaptureWorker
    is_over: threading.Event
    steps: int

    @classmethod
    def of(cls, case: Case) -> Stream:
        run, rows, is_over = case.make_run("shared_dir"), case.make_rows(), threading.Event()
        store = open_store(run.store)
        refs = make_refs(run, StreamPlan.of(run), rows, store.uri)
        watermark = Watermark(samples=case.watermark_steps * BATCH)
        plan = StreamingPlan(refs, StreamOrder(len(refs), BATCH, 0, case.batches), watermark)
        controller = DataFlowController("overlap", SQLiteMetadataStore(case.folder / "control.sqlite"))
        current, own = StreamRound((), plan, controller), open_store(run.store)
        order = PlannedOrder(current, own, rows, run.capture.batch_tokens)
        worker = CaptureWorker(
            "producer", run, order, own, lambda: PacedEngine(run.capture, case.seconds), is_over.is_set
        )
        return cls(plan, controller, store, worker, is_over, case.batches)

    @property
    def refs(self) -> list[SampleRef]:
        return [ref for step in range(1, self.steps + 1) for ref in self.get_refs(step)]

    def get_refs(self, step: int) -> list[SampleRef]:
        return list(self.plan.get_refs(self.plan.get_sample_ids(step)))

    def start_producer(self) -> threading.Thread:
        producing = threading.Thread(target=self.worker.run, daemon=True)
        producing.start()
        return producing


def time_produced(case: Case) -> float:
    """Return the seconds of a producer alone; the watermark has to hold all batches."""
    stream = Stream.of(case)
    keys = [key for ref in stream.refs for key in ref.feature_keys.values()]
    started = time.perf_counter()
    producing = stream.start_producer()
    while stream.store.find_missing(keys):
        time.sleep(POLL_S)
        stream.store.refresh()
    seconds = time.perf_counter() - started
    stream.is_over.set()
    producing.join()
    return seconds


def time_streamed(case: Case, produces: bool = True) -> float:
    """Return the seconds of a streamed training whose steps are pauses.

    Args:
        produces: whether a producer captures meanwhile; otherwise all features are there when the training begins.
    """
    stream = Stream.of(case)
    consumer = StreamConsumer(stream.plan, stream.controller, stream.store)
    reader = AwaitedStore(stream.store, timeout_s=60)
    if not produces:
        for ref in stream.refs:
            stream.store.put(ref, {name: torch.ones(LENGTH, HIDDEN) for name in ref.feature_keys})
    started = time.perf_counter()
    with consumer.hold():
        consumer.reconcile(0)
        producing = stream.start_producer() if produces else None
        for step in range(1, case.batches + 1):
            for ref in stream.get_refs(step):
                _, handle = reader.get(ref)
                reader.release(handle)
            time.sleep(case.seconds if case.step_s is None else case.step_s)
            consumer.on_step(step)
    seconds = time.perf_counter() - started
    if producing is not None:
        producing.join()
    return seconds


def main(
    batches: Annotated[int, typer.Option(min=2)] = 40,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Of the engine, and of what uses its features, a batch.")
    ] = 0.25,
    turns: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print a small table and one line of JSON."""
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {"stored": [], "streamed": [], "trainer alone / pauses": []}
    for _ in range(turns):
        with tempfile.TemporaryDirectory(prefix="overlap.") as folder:
            cases = [Case(batches, seconds, Path(folder) / name) for name in ("stored", "trainer", "streamed")]
            for case in cases:
                case.folder.mkdir()
            stored, trainer, streamed = time_stored(cases[0]), time_streamed(cases[1], False), time_streamed(cases[2])
        alone = cases[0].alone_s
        for found, ratio in zip(ratios.values(), (stored / alone, streamed / max(trainer, alone), trainer / alone)):
            found.append(round(ratio, 3))
    for name, found in ratios.items():
        print(f"{name:>22} {statistics.median(found):6.3f}  ({min(found):.3f} to {max(found):.3f})")
    print(json.dumps({"batches": batches, "seconds": seconds, **ratios}))


if __name__ == "__main__":
    typer.run(main)
