"""A small streamed training of the embedded target: tokens, a planned set, held-out features, a control plane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from capture_toys import WatchedEngine
from draft_run_files import OPTIONS
from waiting import HANG_S

from draftworks.capture.capture_plan import StreamPlan, make_refs, make_set_identity
from draftworks.capture.engine import TargetEngine
from draftworks.capture.session import capture_features
from draftworks.config.capture import CaptureSpec
from draftworks.config.features import StreamFollower, StreamingSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import (
    CaptureRun,
    FeatureSet,
    ProduceRun,
    StoreSpec,
    StreamPlace,
    TargetFiles,
    TrainRun,
)
from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.vocab import build_vocab_mapping, count_supervised_tokens
from draftworks.features.manifest import read_feature_set, write_feature_set
from draftworks.features.open_store import open_store
from draftworks.stream.capture_worker import CaptureWorker, PlannedOrder, WorkerSummary
from draftworks.stream.stream_rounds import StreamRounds
from draftworks.stream.training_stream import count_stream_steps, open_controller


class SerialEngine(WatchedEngine):
    """An engine that workers in threads share: one forward pass at a time, since a capture has hooks in the layers."""

    def __init__(self, engine: TargetEngine) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()

    def capture(self, sequences, taps):
        with self._lock:
            return super().capture(sequences, taps)

    def logits(self, sequences):
        with self._lock:
            return super().logits(sequences)

    def generate(self, *args, **options):
        with self._lock:
            return super().generate(*args, **options)


STREAMS = ("hf2", "hf4", "hf5", "last")
TRAINING = TrainingSpec(
    global_batch_size=4, micro_batch_size=2, epochs=2, lr=5e-3, compute_dtype="float32", log_every=1, save_every=2
)


def make_rows(prefix: str, samples: int, seed: int) -> list[TokenRow]:
    """Samples of 8 to 23 tokens; two of them have the same tokens."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(5, 100, int(rng.integers(8, 24))).astype(np.int32) for _ in range(samples)]
    ids[-1] = ids[0].copy()
    return [TokenRow(f"{prefix}{i}", row, np.arange(len(row)) >= 3) for i, row in enumerate(ids)]


@dataclass(frozen=True)
class StreamFiles:
    """A folder with everything that a streamed training and its stored twin need."""

    folder: Path
    target: TargetFiles
    engine: Callable[[], TargetEngine]
    capture_options: Mapping[str, Any] = field(default_factory=dict)
    settings: StreamingSpec = StreamingSpec(watermark={"samples": 8}, timeout_s=HANG_S)

    def make(self, samples: int = 13) -> StreamFiles:
        for name, count, seed in (("train", samples, 1), ("heldout", 4, 2)):
            write_tokens(self.folder / f"{name}-tokens", make_rows(name, count, seed))
        self.capture("heldout")
        self.plan_set()
        counts = count_supervised_tokens(TokenizedSet.open(self.folder / "train-tokens"), self.target.vocab_size)
        build_vocab_mapping(counts, OPTIONS["draft_vocab_size"]).save(self.folder / "vocab.safetensors")
        return self

    def capture_run(self, name: str) -> CaptureRun:
        """Batches of one sample, so that no feature depends on what is captured beside it."""
        options = {"dtype": "float32", "compute_dtype": "float32", "batch_tokens": 1, **self.capture_options}
        capture = CaptureSpec(device="cpu", **options)
        return CaptureRun(
            out=self.folder / f"{name}-features",
            target=self.target,
            tokens=self.folder / f"{name}-tokens",
            taps=[2, 4, 5],
            capture=capture,
            store=StoreSpec(root=self.folder / "store"),
        )

    def capture(self, name: str) -> None:
        run = self.capture_run(name)
        capture_features(run, self.engine, TokenizedSet.open(run.tokens))

    def plan_set(self) -> None:
        run = self.capture_run("train")
        streams = StreamPlan.of(run)
        store = open_store(self.place.store)
        refs = make_refs(run, streams, TokenizedSet.open(run.tokens), store.uri)
        write_feature_set(self.folder / "planned", refs, make_set_identity(run, streams), streams.names, store.uri)

    @property
    def place(self) -> StreamPlace:
        return StreamPlace(
            database=self.folder / "control.sqlite",
            store=StoreSpec(kind="shared_dir", root=self.folder / "stream"),
            settings=self.settings,
            max_failed_share=self.capture_options.get("max_failed_share", 0.0),
        )

    def train_run(self, out: str, streamed: bool = True, **changes: Any) -> TrainRun:
        (self.folder / out).mkdir(exist_ok=True)
        features = "planned" if streamed else "train-features"
        run = TrainRun(
            out=self.folder / out,
            target=self.target,
            strategy="eagle3",
            options=OPTIONS,
            training=TRAINING,
            train=FeatureSet(tokens=self.folder / "train-tokens", features=self.folder / features),
            heldout=FeatureSet(tokens=self.folder / "heldout-tokens", features=self.folder / "heldout-features"),
            store=StoreSpec(root=self.folder / "store"),
            stream=self.place if streamed else None,
            vocab_mapping=self.folder / "vocab.safetensors",
        )
        return run.model_copy(update=changes)

    def produce_run(
        self,
        worker: str = "producer",
        training: TrainingSpec = TRAINING,
        streams: Sequence[str] = STREAMS,
        followers: Sequence[StreamFollower] = (),
    ) -> ProduceRun:
        run = self.capture_run("train")
        return ProduceRun(
            out=self.folder,
            target=self.target,
            tokens=run.tokens,
            features=self.folder / "planned",
            streams=list(streams),
            capture=run.capture,
            steps=count_stream_steps(len(TokenizedSet.open(run.tokens)), training),
            stream=self.place.model_copy(update={"followers": list(followers)}),
            worker=worker,
        )

    def make_worker(self, run: ProduceRun, should_stop: Callable[[], bool] = lambda: False) -> CaptureWorker:
        tokens, rounds = TokenizedSet.open(run.tokens), self.open_rounds(run)
        current = rounds.open(rounds.read_left_out())
        store = open_store(run.stream.store)
        order = PlannedOrder(current, store, tokens, run.capture.batch_tokens, rounds.watch(current))
        return CaptureWorker(run.worker, run.as_capture(), order, store, self.engine, should_stop)

    def open_rounds(self, run: ProduceRun) -> StreamRounds:
        refs, ids = read_feature_set(run.features).refs, TokenizedSet.open(run.tokens).sample_ids
        return StreamRounds(refs, ids, run.streams, run.steps, run.stream, open_controller(run.stream))

    @contextmanager
    def producing(
        self,
        *workers: str,
        training: TrainingSpec = TRAINING,
        streams: Sequence[str] = STREAMS,
        followers: Sequence[StreamFollower] = (),
    ) -> Iterator[list[WorkerSummary]]:
        """Context with workers in threads, which are told to stop at its end; yields what they did, once it is over."""
        stop, done = threading.Event(), []
        made = [
            self.make_worker(self.produce_run(name, training, streams, followers), stop.is_set)
            for name in workers or ("producer",)
        ]
        threads = [threading.Thread(target=lambda each=each: done.append(each.run())) for each in made]
        for thread in threads:
            thread.start()
        try:
            yield done
        finally:
            stop.set()
            for thread in threads:
                thread.join()
