"""The trainer's side of a stream: acknowledges steps, frees features, and asks for lost ones again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from draftworks.dataflow.consumer_lease import ConsumerLease, hold_consumer
from draftworks.dataflow.controller import DataFlowController
from draftworks.errors import StoreError
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.runtime.streaming_plan import StreamingPlan

FreeAt = Literal["step", "checkpoint"]


@dataclass(frozen=True)
class StreamRestart:
    """What a restart found, in numbers; `draftworks.dataflow.reconcile` has the same for streams without a plan.

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
    """

    def __init__(
        self,
        plan: StreamingPlan,
        controller: DataFlowController,
        store: KeyedFeatureStore,
        free_at: FreeAt = "step",
    ) -> None:
        self.plan = plan
        self._controller = controller
        self._store = store
        self._free_at = free_at
        self._freed_step = 0
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
        acked = self._controller.read_progress().acked_step
        undone = self._controller.rewind(global_step) if acked > global_step else 0
        self._store.free(self.plan.find_freed(1, global_step))
        self._freed_step = global_step
        self._store.refresh()
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
        if self._free_at == "step":
            self._free(global_step)

    def on_checkpoint(self, global_step: int) -> None:
        """Record that a complete checkpoint covers all steps up to `global_step`."""
        self._controller.record_checkpoint(global_step)
        if self._free_at == "checkpoint":
            self._free(global_step)

    def finish(self) -> None:
        """Free all features of the plan; a training that ended early leaves some that producers were ahead with."""
        self._store.refresh()
        keys = {key for ref in self.plan.refs for key in ref.feature_keys.values()}
        self._store.free(sorted(keys.difference(self._store.find_missing(keys))))

    def look(self, ref: SampleRef) -> None:
        """Called while a sample is waited for: have it captured again if it was committed and its features are gone.

        Raises:
            StoreError: the capture of the sample has failed for good.
        """
        for letter in self._controller.read_dead_letters():
            if ref.sample_id in letter.lost_samples:
                raise StoreError(
                    f"sample {ref.sample_id} could not be captured in {len(letter.reasons)} attempts. The first failed "
                    f"because of: {letter.reasons[0]}"
                )
        if not self._controller.find_uncommitted([ref.sample_id]):
            self._store.refresh()
            if self._store.find_missing(ref.feature_keys.values()):
                self._controller.requeue_lost([ref.sample_id])

    def _free(self, global_step: int) -> None:
        if global_step > self._freed_step:
            self._store.free(self.plan.find_freed(self._freed_step + 1, global_step))
            self._freed_step = global_step
