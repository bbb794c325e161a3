"""Rounds of a streamed training: each plans again without the samples that could not be captured in the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from draftworks.config.features import StreamSteps, require_one_schedule
from draftworks.config.run_files import StreamPlace
from draftworks.data.rejected import RejectedSample
from draftworks.features.contracts import SampleRef
from draftworks.features.schedule import find_left_out
from draftworks.stream.controller import DataFlowController
from draftworks.stream.metadata_store import Watermark
from draftworks.stream.streaming_plan import StreamingPlan, StreamOrder


@dataclass(frozen=True)
class StreamRound:
    """A plan without the samples of `left_out`, and the controller of its own run in the control plane.

    Each round has a run of its own, because tasks name batches of one plan.
    """

    left_out: tuple[RejectedSample, ...]
    plan: StreamingPlan
    controller: DataFlowController


class StreamRounds:
    """Makes the plan of a stream without the samples that are left out. Every process makes the same ones.

    Which samples these are is recorded in the control plane, as the references of a run beside that of the training. So
    all consumers and producers of a stream read the same samples in the same order, and go over to the next round when
    there are more.

    Args:
        refs: the planned set.
        population: sample ids of the tokenized set that it was planned from.
        steps: of a training on all of `refs`.
        controller: of the training's first round.
    """

    def __init__(
        self,
        refs: Sequence[SampleRef],
        population: Sequence[str],
        streams: Sequence[str],
        steps: StreamSteps,
        place: StreamPlace,
        controller: DataFlowController,
    ) -> None:
        self._refs = refs
        self._population = population
        self._streams = streams
        self._steps = steps
        self._place = place
        self._controller = controller

    def read_left_out(self) -> tuple[RejectedSample, ...]:
        """Return the samples that the stream goes on without, in the order in which they were left out."""
        refs = _open_log(self._controller).iterate_refs()
        return tuple(RejectedSample(ref.sample_id, ref.metadata["reason"]) for ref in refs)

    def count_left_out(self) -> int:
        """Return the number of samples that the stream goes on without."""
        return len(self.read_left_out())

    def record(self, left_out: Sequence[RejectedSample]) -> None:
        """Record the samples that are left out from now on; those that are recorded already stay as they are."""
        log = _open_log(self._controller)
        log.commit_samples(
            [
                SampleRef(each.sample_id, log.run_id, "left_out", "", {}, {}, metadata={"reason": each.reason})
                for each in left_out
            ]
        )

    def open(self, left_out: tuple[RejectedSample, ...]) -> StreamRound:
        """Return the round without these samples. Raises ConfigError as `make_streaming_plan`."""
        refs = self._list_refs(left_out)
        followers = [
            each.model_copy(update={"steps": self._recount(each.steps, refs)}) for each in self._place.followers
        ]
        place = self._place.model_copy(update={"followers": followers})
        plan = make_streaming_plan(refs, self._streams, self._recount(self._steps, refs), place, self._population)
        return StreamRound(left_out, plan, self.open_run(left_out))

    def open_run(self, left_out: Sequence[RejectedSample]) -> DataFlowController:
        """Return the controller of the round without these samples."""
        return _open_run(self._controller, len(left_out))

    def watch(self, current: StreamRound) -> Callable[[], StreamRound | None]:
        """Return a function that returns the newest round once, whenever the stream has gone over to another one."""
        count = len(current.left_out)

        def find_next() -> StreamRound | None:
            nonlocal count
            left_out = self.read_left_out()
            if len(left_out) == count:
                return None
            count = len(left_out)
            return self.open(left_out)

        return find_next

    def make_order(self, left_out: tuple[RejectedSample, ...]) -> StreamOrder:
        """Return the order of the samples without these."""
        refs = self._list_refs(left_out)
        return _make_order(refs, self._recount(self._steps, refs), self._population)

    def find_failed(self, left_out: tuple[RejectedSample, ...]) -> tuple[RejectedSample, ...]:
        """Return the samples that no attempt could capture in the round without `left_out`, and those of equal content."""
        reasons = {
            sample_id: letter.reasons[-1]
            for letter in self.open_run(left_out).read_dead_letters()
            for sample_id in letter.lost_samples
        }
        refs = self._list_refs(left_out)
        reason_of = {_content_of(ref): reasons[ref.sample_id] for ref in refs if ref.sample_id in reasons}
        return tuple(
            RejectedSample(ref.sample_id, reason_of[_content_of(ref)]) for ref in refs if _content_of(ref) in reason_of
        )

    def _list_refs(self, left_out: tuple[RejectedSample, ...]) -> list[SampleRef]:
        gone = {each.sample_id for each in left_out}
        return [ref for ref in self._refs if ref.sample_id not in gone]

    def _recount(self, steps: StreamSteps, refs: Sequence[SampleRef]) -> StreamSteps:
        return steps if len(refs) == len(self._refs) else steps.recount(len(refs))


def find_newest_run(controller: DataFlowController) -> DataFlowController:
    """Return the controller of a stream's newest round, from that of its first."""
    return _open_run(controller, sum(1 for _ in _open_log(controller).iterate_refs()))


def make_streaming_plan(
    refs: Sequence[SampleRef],
    streams: Sequence[str],
    steps: StreamSteps,
    place: StreamPlace,
    population: Sequence[str] | None = None,
) -> StreamingPlan:
    """Return the plan that trainers and producers share; with `place.followers`, what all of them need together.

    Args:
        population: sample ids of the tokenized set that `refs` were made from; None: they are all of it.

    Raises:
        ConfigError: as `StreamingPlan`, or the followers' schedules differ.
    """
    settings = place.settings
    keep = "capture_again" if settings.keep == "capture_again" else "until_last_use"
    watermark = Watermark(**settings.watermark.model_dump())

    def make(streams: Sequence[str], steps: StreamSteps, followers: Mapping[str, StreamingPlan]) -> StreamingPlan:
        order = _make_order(refs, steps, population)
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


def _open_log(controller: DataFlowController) -> DataFlowController:
    return controller.of_run(f"{controller.run_id}.left_out")


def _open_run(controller: DataFlowController, left_out: int) -> DataFlowController:
    """Return the controller of a round: how many samples are left out names it, since they are in a fixed order."""
    return controller.of_run(f"{controller.run_id}.{left_out}") if left_out else controller


def _make_order(refs: Sequence[SampleRef], steps: StreamSteps, population: Sequence[str] | None) -> StreamOrder:
    left_out = () if population is None else find_left_out(population, (ref.sample_id for ref in refs))
    return StreamOrder(len(refs), steps.global_batch_size, steps.seed, steps.total_steps, left_out)


def _content_of(ref: SampleRef) -> tuple[str, ...]:
    return tuple(ref.feature_keys.values())
