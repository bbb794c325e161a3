"""The trainer's end of a streamed training: what it reads from and waits for, what listens to its steps, and its figures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftworks.capture.verify import require_few_failed
from draftworks.config.features import StreamFollower, StreamSteps
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StreamPlace
from draftworks.data.rejected import RejectedSample
from draftworks.distributed.collectives import broadcast_from_rank_0, get_rank, run_on_every_rank
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef
from draftworks.features.manifest import FeatureSetManifest, FeatureSource
from draftworks.features.open_store import open_store_to_write
from draftworks.features.wrapped_store import WrappedStore
from draftworks.stream.control_client import RemoteMetadataStore
from draftworks.stream.control_wire import load_token
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import MetadataStore
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.stream.stream_consumer import FINISHED, StreamConsumer
from draftworks.stream.stream_rounds import StreamRounds
from draftworks.stream.streaming_plan import StreamingPlan

if TYPE_CHECKING:
    from torch import Tensor


NOTABLE_SHARE = 0.05
"""From this share of the time on, the trainer's waiting is worth a word."""


class StreamReport:
    """Measures what producers captured ahead of the training, and who waited since the measurement before.

    Args:
        plan: of the whole stream.
        read_waited_s: returns the seconds that the trainer has waited for features in all.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        plan: StreamingPlan,
        store: KeyedFeatureStore,
        read_waited_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._store = store
        self._read_waited_s = read_waited_s
        self._clock = clock
        self._before: tuple[float, float, int] | None = None

    def measure(self, step: int) -> dict[str, Any]:
        """Return the figures after a step, by name.

        `ahead_samples` and `ahead_mb` are captured and not used by any step yet; `captured_tokens/s` is what the stream
        delivers since the last measurement; `waiting` is the side that waits.
        """
        self._store.refresh()
        due = self._plan.find_ahead(step)
        missing = set(self._store.find_missing(key for ref in due for key in ref.feature_keys.values()))
        ahead = [ref for ref in due if missing.isdisjoint(ref.feature_keys.values())]
        figures = {
            "ahead_samples": len(ahead),
            "ahead_mb": round(sum(ref.estimated_bytes for ref in ahead) / 1e6, 1),
        }
        tokens = self._plan.count_new_tokens(step) + sum(ref.num_tokens for ref in ahead)
        now, waited_s = self._clock(), self._read_waited_s()
        if self._before is not None:
            elapsed = max(now - self._before[0], 1e-9)
            share = (waited_s - self._before[1]) / elapsed
            figures["captured_tokens/s"] = round(max(tokens - self._before[2], 0) / elapsed)
            figures["waiting"] = f"trainer:{min(share, 1):.0%}" if share > NOTABLE_SHARE else self._name_other(missing)
        self._before = (now, waited_s, tokens)
        return figures

    @staticmethod
    def _name_other(missing: set[str]) -> str:
        """Return who waits if the trainer does not: producers that have filled their window."""
        return "nobody" if missing else "producers"


POLL_S = 0.01
LOOK_S = 1.0
"""Between two looks at the producers while waiting."""


class AwaitedStore(WrappedStore):
    """Reads planned features from `store`; waits for those that are not there yet.

    A sample that will never come is given up: random numbers are returned in its place. A rank that raised an error
    instead would leave the others waiting in a collective; the training discards the step on all ranks.

    Attributes:
        waited_s: seconds that all calls of `get` together have waited.
        given_up: ids of the samples that random numbers were returned for. Once there is one, no other is waited for.

    Args:
        timeout_s: how long one sample may be waited for.
        look: called about once a second while waiting, with the sample that is missing; asks for features that were
            lost to be captured again, and returns whether the sample will never come.
        explain: called when the time is over; returns what else may be the reason, empty for nothing.
    """

    def __init__(
        self,
        store: KeyedFeatureStore,
        timeout_s: float,
        look: Callable[[SampleRef], bool] = lambda ref: False,
        explain: Callable[[], str] = str,
    ) -> None:
        super().__init__(store)
        self._keyed = store
        self._timeout_s = timeout_s
        self._look = look
        self._explain = explain
        self.waited_s = 0.0
        self.given_up: set[str] = set()
        self._stops = 0

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Fetch as `FeatureStore.get`. Features that are lost before they are read are waited for again.

        Raises:
            StoreError: the features have not come within `timeout_s` seconds.
        """
        started, stops = time.monotonic(), self._stops
        while True:
            if not self._wait(ref, started, stops):
                self.given_up.add(ref.sample_id)
                return _make_random(ref), FeatureHandle(ref.sample_id, "")
            try:
                return self._store.get(ref)
            except StoreError:
                if not self._keyed.find_missing(ref.feature_keys.values()):
                    raise

    def _wait(self, ref: SampleRef, started: float, stops: int) -> bool:
        """Wait for a sample's features; return False if they will never come."""
        began = looked = time.monotonic()
        while self._keyed.find_missing(ref.feature_keys.values()):
            now = time.monotonic()
            if self._stops != stops:
                raise StoreError(f"sample {ref.sample_id} is not waited for any more: the reader has stopped")
            if now - started > self._timeout_s:
                reason = self._explain() or "Look at the producers' logs"
                raise StoreError(
                    f"sample {ref.sample_id}: its features have not come within {self._timeout_s:g} s. {reason}, or "
                    "raise streaming.timeout_s if they are slow"
                )
            if self.given_up or (now - looked > LOOK_S and self._look(ref)):
                return False
            looked = now if now - looked > LOOK_S else looked
            time.sleep(POLL_S)
            self._keyed.refresh()
        self.waited_s += time.monotonic() - began
        return True

    def release(self, handle: FeatureHandle) -> None:
        if handle.sample_id not in self.given_up:
            self._store.release(handle)

    def stop_waiting(self) -> None:
        self._stops += 1


def _make_random(ref: SampleRef) -> dict[str, Tensor]:
    """Return tensors of a sample's shapes and dtypes, normally distributed, so that no norm of them is zero."""
    from draftworks.features.tensor_bytes import make_random_stored

    return {name: make_random_stored(spec.shape, spec.dtype) for name, spec in ref.feature_specs.items()}


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
