"""The trainer's end of a streamed training: what it reads from, and what listens to its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StreamPlace, StreamSteps
from draftworks.config.streaming import StreamFollower, require_one_schedule
from draftworks.dataflow.control_client import RemoteMetadataStore
from draftworks.dataflow.control_wire import load_token
from draftworks.dataflow.controller import DataFlowController
from draftworks.dataflow.metadata_store import MetadataStore
from draftworks.dataflow.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.dataflow.watermark import Watermark
from draftworks.distributed.collectives import get_rank, run_on_every_rank
from draftworks.errors import ConfigError, DraftworksError
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.manifest import FeatureSetManifest
from draftworks.features.open_store import open_store_to_write
from draftworks.runtime.awaited_store import AwaitedStore
from draftworks.runtime.stream_consumer import StreamConsumer
from draftworks.runtime.stream_order import StreamOrder
from draftworks.runtime.streaming_plan import StreamingPlan

CONSUMER_LEASE_S = 30.0
"""How long a trainer that was killed keeps its successor waiting, at most."""
CONTROL_RETRY_S = 120.0
"""How long a call of the control plane is repeated while its server cannot be reached, as it is started again."""
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
    """Return the plan that trainers and producers share; with `place.followers`, what all of them need together.

    Raises:
        ConfigError: as `StreamingPlan`, or the followers' schedules differ.
    """
    settings = place.settings
    keep = "capture_again" if settings.keep == "capture_again" else "until_last_use"
    watermark = Watermark(**settings.watermark.model_dump())

    def make(streams: Sequence[str], steps: StreamSteps, followers: Mapping[str, StreamingPlan]) -> StreamingPlan:
        order = StreamOrder(len(refs), steps.global_batch_size, steps.seed, steps.total_steps)
        return StreamingPlan([select_streams(ref, streams) for ref in refs], order, watermark, keep, followers)

    if not place.followers:
        return make(streams, steps, {})
    require_one_schedule(place.followers)
    longest = max((each.steps for each in place.followers), key=lambda each: each.total_steps)
    read = list(dict.fromkeys(stream for each in place.followers for stream in each.streams))
    return make(read, longest, {each.name: make(each.streams, each.steps, {}) for each in place.followers})


def select_streams(ref: SampleRef, streams: Sequence[str]) -> SampleRef:
    """Return a planned reference with these streams only, and their bytes, for the store of a stream."""
    chosen = ref.select(tuple(sorted(streams, key=list(ref.feature_keys).index)))
    nbytes = sum(spec.nbytes for spec in chosen.feature_specs.values())
    return replace(chosen, estimated_bytes=nbytes)


def open_controller(place: StreamPlace) -> DataFlowController:
    """Open the control plane of a streamed training: its database, or the client of the server that owns it.

    Raises:
        ConfigError: the control server's secret is not known here.
        StoreError: as `SQLiteMetadataStore`.
    """
    lease_s = place.settings.lease_s
    store: MetadataStore
    if place.control is not None:
        retry_s = min(CONTROL_RETRY_S, place.settings.timeout_s)
        store = RemoteMetadataStore(place.control, load_token(place.token_file), retry_s)
    else:
        assert place.database is not None
        store = SQLiteMetadataStore(place.database)
    return DataFlowController(
        place.run_id,
        store,
        consumer=place.consumer,
        lease_s=lease_s,
        consumer_lease_s=min(lease_s, CONSUMER_LEASE_S),
    )


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
        self.shared: StreamingPlan
        self.consumer: StreamConsumer
        self.reader: AwaitedStore

    def open_reader(self, manifest: FeatureSetManifest) -> FeatureStore:
        """Return the store that the rank's loader reads the planned set from.

        Raises:
            ConfigError: the watermark is below one global batch.
            StoreError: the store or the database cannot be used.
        """
        steps = count_stream_steps(len(manifest.refs), self._training)
        self.shared = make_streaming_plan(manifest.refs, self._streams, steps, self._place)
        self.plan = self.shared
        if self._place.followers:
            self._require_planned(steps)
            self.plan = self.shared.followers[self._place.consumer]
        controller = open_controller(self._place)
        store = open_store_to_write(self._place.store)
        self.consumer = StreamConsumer(self.plan, controller, store, self._place.settings.free_at, self.shared)
        self.reader = AwaitedStore(
            store, self._place.settings.timeout_s, self.consumer.look, self.consumer.explain_wait
        )
        return self.reader

    def _require_planned(self, steps: StreamSteps) -> None:
        """Raise ConfigError unless this training is one of those that the stream is planned for."""
        own = StreamFollower(name=self._place.consumer, streams=list(self._streams), steps=steps)
        planned = [each for each in self._place.followers if each.name == own.name]
        if not planned or planned[0].steps != steps or set(planned[0].streams) != set(own.streams):
            raise ConfigError(
                f"stream.followers: expected {own.model_dump()} among them, as this training reads the stream, found "
                f"{[each.model_dump() for each in planned] or [each.name for each in self._place.followers]}"
            )

    def describe(self) -> str:
        """Return what the stream costs: tokens to capture, and bytes in its store."""
        others = [name for name in self.shared.followers if name != self._place.consumer]
        return (
            f"features stream to the trainer: {self.shared.captured_tokens:,} tokens to capture, at most "
            f"{self.shared.peak_bytes / 1e9:.3f} GB in the store ({self.plan.keep})"
            f"{', together with ' * bool(others)}{', '.join(others)}"
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
            try:
                yield
            except Exception as error:
                if get_rank() == 0 and self.shared.followers:
                    self._give_up(error)
                raise

    def _give_up(self, error: Exception) -> None:
        """Give up all claims, so that nobody waits for a training that has failed."""
        try:
            self.consumer.finish(f"it has failed: {str(error).partition(chr(10))[0]}")
        except DraftworksError as other:
            log.warning("the claims of %s could not be given up: %s", self._place.consumer, other)
