"""The trainer's end of a streamed training: what it reads from, and what listens to its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StreamPlace, StreamSteps
from draftworks.dataflow.controller import DataFlowController
from draftworks.dataflow.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.dataflow.watermark import Watermark
from draftworks.distributed.collectives import get_rank, run_on_every_rank
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.manifest import FeatureSetManifest
from draftworks.features.open_store import open_store_to_write
from draftworks.runtime.awaited_store import AwaitedStore
from draftworks.runtime.stream_consumer import StreamConsumer
from draftworks.runtime.stream_order import StreamOrder
from draftworks.runtime.streaming_plan import StreamingPlan

CONSUMER_LEASE_S = 30.0
"""How long a trainer that was killed keeps its successor waiting, at most."""
log = logging.getLogger(__name__)


def count_stream_steps(samples: int, training: TrainingSpec) -> StreamSteps:
    """Return what decides the order of a training's samples."""
    steps_per_epoch = samples // training.global_batch_size
    return StreamSteps(
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        total_steps=training.count_steps(steps_per_epoch),
    )


def make_streaming_plan(
    refs: Sequence[SampleRef], streams: Sequence[str], steps: StreamSteps, place: StreamPlace
) -> StreamingPlan:
    """Return the plan that trainer and producers share. Raises ConfigError as `StreamingPlan`."""
    settings = place.settings
    order = StreamOrder(len(refs), steps.global_batch_size, steps.seed, steps.total_steps)
    chosen = [select_streams(ref, streams) for ref in refs]
    keep = "capture_again" if settings.keep == "capture_again" else "until_last_use"
    return StreamingPlan(chosen, order, Watermark(**settings.watermark.model_dump()), keep)


def select_streams(ref: SampleRef, streams: Sequence[str]) -> SampleRef:
    """Return a planned reference with these streams only, and their bytes, for the store of a stream."""
    chosen = ref.select(tuple(sorted(streams, key=list(ref.feature_keys).index)))
    nbytes = sum(spec.nbytes for spec in chosen.feature_specs.values())
    return replace(chosen, estimated_bytes=nbytes)


def open_controller(place: StreamPlace) -> DataFlowController:
    """Open the control plane of a streamed training. Raises StoreError as `SQLiteMetadataStore`."""
    lease_s = place.settings.lease_s
    store = SQLiteMetadataStore(place.database)
    return DataFlowController(place.run_id, store, lease_s=lease_s, consumer_lease_s=min(lease_s, CONSUMER_LEASE_S))


class TrainingStream:
    """A rank's end of a streamed training: it reads features as they come, and rank 0 acknowledges the steps.

    Args:
        streams: names of the streams that the draft reads.
    """

    def __init__(self, place: StreamPlace, training: TrainingSpec, streams: Sequence[str]) -> None:
        self._place = place
        self._training = training
        self._streams = streams
        self.plan: StreamingPlan
        self.consumer: StreamConsumer
        self.reader: AwaitedStore

    def open_reader(self, manifest: FeatureSetManifest) -> FeatureStore:
        """Return the store that the rank's loader reads the planned set from.

        Raises:
            ConfigError: the watermark is below one global batch.
            StoreError: the store or the database cannot be used.
        """
        steps = count_stream_steps(len(manifest.refs), self._training)
        self.plan = make_streaming_plan(manifest.refs, self._streams, steps, self._place)
        controller = open_controller(self._place)
        store = open_store_to_write(self._place.store)
        self.consumer = StreamConsumer(self.plan, controller, store, self._place.settings.free_at)
        self.reader = AwaitedStore(store, self._place.settings.timeout_s, self.consumer.look)
        return self.reader

    def describe(self) -> str:
        """Return what the stream costs: tokens to capture, and bytes in its store."""
        return (
            f"features stream to the trainer: {self.plan.captured_tokens:,} tokens to capture, at most "
            f"{self.plan.peak_bytes / 1e9:.3f} GB in the store ({self.plan.keep})"
        )

    @contextmanager
    def follow(self, global_step: int) -> Iterator[None]:
        """Context of the training after `global_step`: rank 0 is the stream's consumer in it. A collective.

        Raises:
            StoreError: on all ranks, another process trains from this stream.
        """
        with ExitStack() as held:

            def begin() -> None:
                held.enter_context(self.consumer.hold())
                log.info("%s", self.consumer.reconcile(global_step))

            run_on_every_rank(begin if get_rank() == 0 else lambda: None)
            yield
