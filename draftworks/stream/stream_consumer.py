"""The trainer's side of a stream: acknowledges steps, frees what no training that follows it needs, asks again for lost features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftworks.capture.capture_plan import SampleJob
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.stream.controller import DataFlowController
from draftworks.stream.leases import ConsumerLease, hold_consumer
from draftworks.stream.metadata_store import ConsumerProgress
from draftworks.stream.streaming_plan import StreamingPlan

FreeAt = Literal["step", "checkpoint"]
Progress = Mapping[str, ConsumerProgress]
"""Progress of consumers by name; one that has done nothing yet may be absent."""
_NOT_BEGUN = ConsumerProgress()


class StreamClaims:
    """The claims of all followers of a stream. A follower that has left has none; one that has not begun has all.

    Args:
        plan: what producers capture for all followers together.
        alone: the follower's name where the plan is that of one training.
        free_at: as in `StreamConsumer`: with `checkpoint`, steps after the last checkpoint may be trained again.
    """

    def __init__(self, plan: StreamingPlan, alone: str, free_at: FreeAt = "step") -> None:
        self._plan = plan
        self._plans: Mapping[str, StreamingPlan] = plan.followers or {alone: plan}
        self._free_at = free_at

    @property
    def is_shared(self) -> bool:
        return len(self._plans) > 1

    def find_done_step(self, progress: Progress) -> int | None:
        """Return the step that every follower has done; None if no follower trains any more."""
        done = {name: each.done_step for name, each in self._iterate_present(progress)}
        return min((step for name, step in done.items() if step < self._plans[name].order.total_steps), default=None)

    def find_slowest(self, progress: Progress) -> str:
        """Return the name of the follower that has done the fewest steps of those that take part."""
        return min(self._iterate_present(progress), key=lambda item: item[1].done_step)[0]

    def list_left(self, progress: Progress) -> frozenset[str]:
        """Return the followers that need nothing any more."""
        return frozenset(name for name in self._plans if progress.get(name, _NOT_BEGUN).left)

    def list_free(self, name: str, contents: np.ndarray, progress: Progress, window_end: int) -> list[str]:
        """Return the feature keys that `name` reads of some contents and no follower needs any more.

        Args:
            contents: indices of contents of the plan, (N,).
            window_end: the last step that producers may have captured for.
        """
        plan = self._plans[name]
        needed = self._find_needed(contents, progress, window_end)
        kept = {stream: needed.get(stream, np.zeros(len(contents), np.bool_)) for stream in plan.streams}
        return [
            plan.get_key(content, stream)
            for index, content in enumerate(contents)
            for stream in plan.streams
            if not kept[stream][index]
        ]

    def list_all_free(self, progress: Progress) -> list[str]:
        """Return the keys of everything that may have been captured and that no follower needs any more."""
        ahead = max((each.done_step for _, each in self._iterate_present(progress)), default=None)
        end = self._plan.order.total_steps if ahead is None else self._plan.find_window_end(ahead)
        keys: dict[str, None] = {}
        for name, plan in self._plans.items():
            keys.update(dict.fromkeys(self.list_free(name, plan.list_contents(end), progress, end)))
        return list(keys)

    def drop_unneeded(self, jobs: Sequence[SampleJob], progress: Progress, window_end: int) -> list[tuple[str, ...]]:
        """Return for each job the missing streams that a follower still needs."""
        contents = self._plan.get_contents([job.row for job in jobs])
        needed = self._find_needed(contents, progress, window_end)
        return [
            tuple(stream for stream in job.missing if stream in needed and needed[stream][index])
            for index, job in enumerate(jobs)
        ]

    def _find_needed(self, contents: np.ndarray, progress: Progress, window_end: int) -> dict[str, np.ndarray]:
        """Return for each stream whether a follower needs it of each content, (N,)."""
        needed: dict[str, np.ndarray] = {}
        for name, each in self._iterate_present(progress):
            step = each.done_step if self._free_at == "step" else each.checkpoint_step
            wanted = self._plans[name].find_claimed(contents, step, window_end)
            for stream in self._plans[name].streams:
                needed[stream] = needed[stream] | wanted if stream in needed else wanted
        return needed

    def _iterate_present(self, progress: Progress) -> Iterator[tuple[str, ConsumerProgress]]:
        for name in self._plans:
            each = progress.get(name, _NOT_BEGUN)
            if not each.left:
                yield name, each


FINISHED = "it has finished"


@dataclass(frozen=True)
class StreamRestart:
    """What a restart found, in numbers; `draftworks.stream.step_acks` has the same for streams without a plan.

    Attributes:
        requeued: contents that are needed again and whose features are gone: they are captured again.
        released: acknowledged samples whose step a complete checkpoint covers.
        global_step: the step that the training resumes after.
        optimizer_durable: whether a checkpoint covers everything that was acknowledged.
    """

    requeued: int
    released: int
    global_step: int
    optimizer_durable: bool


class StreamConsumer:
    """Step listener of a training's rank 0, which acknowledges the steps to the control plane.

    Args:
        free_at: `step` frees features when the optimizer step that used them last is done, `checkpoint` when a complete
            checkpoint covers it. After a crash, freed features of steps that are trained again are captured again.
        shared: the plan of the whole stream, where other trainings follow it too. What they need stays.
        is_superseded: whether the stream goes on with another plan.

    Attributes:
        cannot_go_on: whether the next step takes a sample that no attempt could capture, or there is another plan.
    """

    def __init__(
        self,
        plan: StreamingPlan,
        controller: DataFlowController,
        store: KeyedFeatureStore,
        free_at: FreeAt = "step",
        shared: StreamingPlan | None = None,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = plan
        self.cannot_go_on = False
        self._is_superseded = is_superseded
        self._name = controller.consumer
        self._claims = StreamClaims(shared or plan, self._name, free_at)
        self._window = shared or plan
        self._controller = controller
        self._store = store
        self._free_at = free_at
        self._acked_step = 0
        self._freed_step = 0
        self._left: frozenset[str] = frozenset()
        self._lease: ConsumerLease | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context in which this process holds the consumer's identity; that of a killed trainer is waited for.

        Raises:
            StoreError: another process holds it: a second trainer would take a part of the steps.
        """
        with hold_consumer(self._controller) as self._lease:
            yield

    def reconcile(self, global_step: int) -> StreamRestart:
        """Resume after `global_step`: undo later acknowledgements, and have features captured again that were freed.

        Features that a process which was killed had no time to free are freed.
        """
        self._controller.record_left("")
        before = self._controller.read_progress()
        is_there = before.acked_step == global_step and before.checkpoint_step <= global_step
        undone = 0 if is_there else self._controller.rewind(global_step)
        self._acked_step = self._freed_step = global_step
        self._store.refresh()
        self._free_all()
        needed = self.plan.find_needed(global_step)
        missing = set(self._store.find_missing(key for ref in needed for key in ref.feature_keys.values()))
        lost = [ref.sample_id for ref in needed if not missing.isdisjoint(ref.feature_keys.values())]
        self._controller.requeue_lost(lost)
        released = global_step * self.plan.order.global_batch_size
        return StreamRestart(len(lost), released, global_step, undone == 0)

    def on_step(self, global_step: int) -> None:
        """Record that an optimizer step is done, in one transaction; then free what nothing needs any more.

        The trainer may be ahead of the producers' commits where the store has features of before.
        """
        if self._lease is not None:
            self._lease.require_held()
        ids = self.plan.get_sample_ids(global_step)
        ahead = self._controller.find_uncommitted(ids)
        if ahead:
            self._controller.commit_samples(self.plan.get_refs(ahead))
        self._controller.ack(ids, global_step, self.plan.order.get_epoch(global_step))
        self._acked_step = global_step
        if self._free_at == "step":
            self._free(global_step)
        if global_step < self.plan.order.total_steps:
            lost = self._find_lost()
            self.cannot_go_on = not lost.isdisjoint(self.plan.get_sample_ids(global_step + 1)) or self._is_superseded()

    def on_checkpoint(self, global_step: int) -> None:
        """Record that a complete checkpoint covers all steps up to `global_step`."""
        self._controller.record_checkpoint(global_step)
        if self._free_at == "checkpoint":
            self._free(global_step)

    def finish(self, reason: str = FINISHED) -> None:
        """Give up all claims; free what no other training needs, also what producers were ahead with.

        Producers end when the last training has finished.
        """
        self._controller.record_left(reason)
        self._free_all()

    def free(self, keys: Iterable[str]) -> None:
        """Free features, as far as the store has them."""
        self._store.refresh()
        keys = list(dict.fromkeys(keys))
        missing = set(self._store.find_missing(keys))
        self._store.free([key for key in keys if key not in missing])

    def look(self, ref: SampleRef) -> bool:
        """Called while a sample is waited for: have it captured again if it was committed and its features are gone.

        Returns whether it will never come, because no attempt could capture it or there is another plan.
        """
        if ref.sample_id in self._find_lost() or self._is_superseded():
            return True
        if not self._controller.find_uncommitted([ref.sample_id]):
            self._store.refresh()
            if self._store.find_missing(ref.feature_keys.values()):
                self._requeue_all_lost()
        return False

    def _requeue_all_lost(self) -> None:
        """Have everything captured again that was committed, is needed and is gone: a store is often lost as a whole."""
        needed = self.plan.find_needed(self._controller.read_progress().done_step)
        missing = set(self._store.find_missing(key for ref in needed for key in ref.feature_keys.values()))
        lost = [ref.sample_id for ref in needed if not missing.isdisjoint(ref.feature_keys.values())]
        uncommitted = set(self._controller.find_uncommitted(lost))
        self._controller.requeue_lost([sample_id for sample_id in lost if sample_id not in uncommitted])

    def explain_wait(self) -> str:
        """Return for whom producers wait, if that is another training; empty otherwise."""
        progress = self._read_progress()
        name = self._claims.find_slowest(progress) if self._claims.is_shared else self._name
        if name == self._name:
            return ""
        step = progress[name].done_step if name in progress else 0
        return f"{name}, which follows the same stream, has done step {step}, and producers go no further ahead of it"

    def _find_lost(self) -> set[str]:
        """Return the samples that no attempt could capture."""
        return {sample_id for letter in self._controller.read_dead_letters() for sample_id in letter.lost_samples}

    def _free(self, global_step: int) -> None:
        """Free what was used last at a step up to `global_step`; everything free once another training has left."""
        if global_step <= self._freed_step:
            return
        progress = self._read_progress(global_step)
        left = self._claims.list_left(progress)
        if left - self._left:
            self._free_all()
        else:
            ended = self.plan.find_ended(self._freed_step + 1, global_step)
            end = self._window.find_window_end(self._acked_step)
            self._store.free(self._claims.list_free(self._name, ended, progress, end))
        self._left, self._freed_step = left, global_step

    def _free_all(self) -> None:
        self.free(self._claims.list_all_free(self._controller.read_consumers()))

    def _read_progress(self, checkpoint_step: int = 0) -> dict[str, ConsumerProgress]:
        """Return the progress of all trainings; of one that is alone, what it knows itself."""
        if self._claims.is_shared:
            return self._controller.read_consumers()
        return {self._name: ConsumerProgress(self._acked_step, checkpoint_step)}
