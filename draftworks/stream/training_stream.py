"""The trainer's end of a streamed training: what it reads from, and what listens to its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from draftworks.capture.verify import require_few_failed
from draftworks.config.features import StreamFollower, StreamSteps
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StreamPlace
from draftworks.data.rejected import RejectedSample
from draftworks.distributed.collectives import broadcast_from_rank_0, get_rank, run_on_every_rank
from draftworks.errors import ConfigError, DraftworksError
from draftworks.features.manifest import FeatureSetManifest, FeatureSource
from draftworks.features.open_store import open_store_to_write
from draftworks.stream.awaited_store import AwaitedStore
from draftworks.stream.control_client import RemoteMetadataStore
from draftworks.stream.control_wire import load_token
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import MetadataStore
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.stream.stream_consumer import FINISHED, StreamConsumer
from draftworks.stream.stream_report import StreamReport
from draftworks.stream.stream_rounds import StreamRounds
from draftworks.stream.streaming_plan import StreamingPlan

CONSUMER_LEASE_S = 30.0
"""How long a trainer that was killed keeps its successor waiting, at most."""
PLAN_AGAIN = 1 << 10
"""The stop code of a training that has to plan again; above all numbers of signals."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlierRound:
    """A round that was replaced.

    Attributes:
        features: content version of the features of its plan.
        common_steps: after so many steps its samples differ from those of the present round.
    """

    features: str
    common_steps: int


def count_stream_steps(samples: int, training: TrainingSpec) -> StreamSteps:
    """Return what decides the order of a training's samples."""
    return training.make_stream_steps(samples)


def open_controller(place: StreamPlace, retry_s: float | None = None) -> DataFlowController:
    """Open the control plane of a streamed training: its database, or the client of the server that owns it.

    Args:
        retry_s: how long a call is repeated while the server cannot be reached; by default as long as features are waited
            for, since a job of a scheduler outlives the run that has the server, and the next run starts it again.

    Raises:
        ConfigError: the control server's secret is not known here.
        StoreError: as `SQLiteMetadataStore`.
    """
    lease_s = place.settings.lease_s
    store: MetadataStore
    if place.control is not None:
        patience_s = place.settings.timeout_s if retry_s is None else retry_s
        store = RemoteMetadataStore(place.control, load_token(place.token_file), patience_s)
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

    Samples that could not be captured are left out of the plan. A training that finds new ones stops (`stop_code`, or
    `discards` a step that was under way); the next `TrainingStream` plans without them, and so do all that follow the
    same stream.

    Args:
        streams: names of the streams that the draft reads.
        target: its name, for messages.

    Attributes:
        left_out: samples that the plan goes on without.
    """

    def __init__(self, place: StreamPlace, training: TrainingSpec, streams: Sequence[str], target: str) -> None:
        self._place = place
        self._training = training
        self._streams = streams
        self._target = target
        self._rounds: StreamRounds
        self._planned: FeatureSetManifest
        self.left_out: tuple[RejectedSample, ...]
        self.plan: StreamingPlan
        self.shared: StreamingPlan
        self.consumer: StreamConsumer
        self.reader: AwaitedStore
        self.report: StreamReport

    def open_source(self, manifest: FeatureSetManifest, population: Sequence[str]) -> FeatureSource:
        """Return the samples of a planned set that the training takes, and the store to read them from. A collective.

        Args:
            population: sample ids of the tokenized set that the features are planned for.

        Raises:
            CaptureError: more samples could not be captured than `max_failed_share` allows.
            ConfigError: the watermark is below one global batch.
            StoreError: the store or the database cannot be used.
        """
        self._planned = manifest
        steps = count_stream_steps(len(manifest.refs), self._training)
        if self._place.followers:
            self._require_planned(steps)
        controller = open_controller(self._place)
        self._rounds = StreamRounds(manifest.refs, population, self._streams, steps, self._place, controller)
        settled = run_on_every_rank(lambda: self._settle(len(population)) if get_rank() == 0 else ())
        current = self._rounds.open(broadcast_from_rank_0(settled))
        self.left_out, self.shared = current.left_out, current.plan
        self.plan = self.shared.followers[self._place.consumer] if self._place.followers else self.shared
        store = open_store_to_write(self._place.store)
        self.consumer = StreamConsumer(
            self.plan,
            current.controller,
            store,
            self._place.settings.free_at,
            self.shared,
            is_superseded=lambda: self._rounds.count_left_out() > len(self.left_out),
        )
        self.reader = AwaitedStore(
            store, self._place.settings.timeout_s, self.consumer.look, self.consumer.explain_wait
        )
        self.report = StreamReport(self.shared, store, lambda: self.reader.waited_s)
        return FeatureSource(manifest.leave_out(each.sample_id for each in self.left_out), self.reader)

    @property
    def stop_code(self) -> int:
        """`PLAN_AGAIN` if this rank knows that the plan cannot be trained to its end, else 0."""
        return PLAN_AGAIN if self.consumer.cannot_go_on or self.reader.given_up else 0

    def discards(self, global_step: int) -> bool:
        """Whether this rank read random numbers in the place of a sample of this step."""
        return not self.reader.given_up.isdisjoint(self.plan.get_sample_ids(global_step))

    def list_earlier_rounds(self, names: Iterable[str]) -> Iterator[EarlierRound]:
        """Yield the rounds that this one replaced, the last one first, with the version of the features `names`."""
        names = tuple(names)
        for count in reversed(range(len(self.left_out))):
            before = self.left_out[:count]
            features = self._planned.leave_out(each.sample_id for each in before).version_of(names)
            yield EarlierRound(features, self._rounds.make_order(before).count_common_steps(self.plan.order))

    def _settle(self, population: int) -> tuple[RejectedSample, ...]:
        """Return the samples to plan without: those recorded, and those that failed for good in the newest round."""
        recorded = self._rounds.read_left_out()
        failed = self._rounds.find_failed(recorded)
        for each in failed:
            log.warning("sample %s is left out: %s", each.sample_id, each.reason)
        left_out = (*recorded, *failed)
        if failed:
            planned_without = population - len(self._planned.refs)
            require_few_failed(
                self._target, self._place.max_failed_share, left_out, population, without=planned_without
            )
        return left_out

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
            f"{f'; {len(self.left_out)} samples that could not be captured are left out' * bool(self.left_out)}"
        )

    def finish(self) -> None:
        """Give up all claims after the last step, see `StreamConsumer.finish`."""
        self.consumer.finish()
        self._leave_newest_round(FINISHED)
        progress = self._rounds.open_run(self._rounds.read_left_out()).read_consumers()
        if all(name in progress and progress[name].left for name in self.shared.followers):
            # Rounds before may have captured what the last plan does not take.
            refs = self._planned.refs if self.left_out else ()
            self.consumer.free(ref.feature_keys[name] for ref in refs for name in self.shared.streams)

    def _leave_newest_round(self, reason: str) -> None:
        """Give up all claims in the round that other followers have gone over to, if there is one."""
        newest = self._rounds.read_left_out()
        if len(newest) > len(self.left_out):
            self._rounds.open_run(newest).record_left(reason, self._place.consumer)

    @contextmanager
    def follow(self, global_step: int) -> Iterator[bool]:
        """Context of the training after `global_step`: rank 0 is the stream's consumer in it. A collective.

        Yields whether the plan is that of the stream; if not, another training has left out other samples meanwhile.

        Raises:
            StoreError: on all ranks, another process trains from this stream.
        """
        with ExitStack() as held:

            def begin() -> bool:
                held.enter_context(self.consumer.hold())
                log.info("%s", self.consumer.reconcile(global_step))
                return self._begin_round()

            is_current = broadcast_from_rank_0(run_on_every_rank(begin if get_rank() == 0 else lambda: True))
            try:
                yield is_current
            except Exception as error:
                if get_rank() == 0 and self.shared.followers:
                    self._give_up(error)
                raise

    def _begin_round(self) -> bool:
        """Record the round, which makes producers and other followers go over to it; they know where it begins now.

        A follower that has left the round before has no claims in this one either. Returns whether what is recorded is
        what this plan leaves out.
        """
        before = self._rounds.read_left_out()
        if before == self.left_out:
            return True
        self._rounds.record(self.left_out)
        current = self._rounds.open_run(self.left_out)
        for name, progress in self._rounds.open_run(before).read_consumers().items():
            if progress.left and name != self._place.consumer:
                current.record_left(progress.left, name)
        return self._rounds.read_left_out() == self.left_out

    def _give_up(self, error: Exception) -> None:
        """Give up all claims, so that nobody waits for a training that has failed."""
        try:
            reason = f"it has failed: {str(error).partition(chr(10))[0]}"
            self.consumer.finish(reason)
            self._leave_newest_round(reason)
        except DraftworksError as other:
            log.warning("the claims of %s could not be given up: %s", self._place.consumer, other)
