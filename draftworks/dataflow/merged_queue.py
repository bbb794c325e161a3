"""References of several channels as one queue: producers in several processes, any of which may die."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from draftworks.dataflow.id_set import SampleIdSet
from draftworks.dataflow.ref_queues import IDLE_TIMEOUT_S, RefQueue
from draftworks.dataflow.watermark import POLL_S, InFlight
from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef

log = logging.getLogger(__name__)


class MergedRefQueue(RefQueue):
    """The references of several queues in the order in which they arrive, each sample once.

    Producers that share the tasks of a run have a channel each. One that finds no task left publishes all that any of
    them has committed, and ends its channel: so the merged queue is drained when *one* of its queues is. A producer that
    fails, or is killed, holds nobody up as long as another one goes on.

    Args:
        queues: none of which has skipped or handed out anything.
        skip_ids: samples that were durably trained before: left out, and counted as consumed.
        idle_timeout_s: the longest wait in which no queue gives anything.
    """

    def __init__(
        self, queues: Sequence[RefQueue], skip_ids: Iterable[str] = (), idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> None:
        self._queues = list(queues)
        self._failures: dict[int, StoreError] = {}
        self._seen = SampleIdSet(skip_ids)
        self._owners: dict[str, RefQueue] = {}
        self._idle_timeout_s = idle_timeout_s
        self._idle_since: float | None = None
        self._turn = 0

    @property
    def is_drained(self) -> bool:
        return any(queue.is_drained for queue in self._queues)

    def require_batch(self, batch: InFlight) -> None:
        for queue in self._queues:
            queue.require_batch(batch)

    def get(self, count: int, wait_s: float | None = None) -> list[SampleRef]:
        until = None if wait_s is None else time.monotonic() + wait_s
        while True:
            refs = self._take(count)
            if refs:
                self._idle_since = None
                return refs
            if self.is_drained:
                return []
            now = time.monotonic()
            if until is not None and now >= until:
                return []
            self._idle_since = self._idle_since or now
            if now - self._idle_since > self._idle_timeout_s:
                raise StoreError(
                    f"no reference came through any of {len(self._queues)} channels for {self._idle_timeout_s:g} s. Look at "
                    "the producers' logs, or raise the idle timeout"
                )
            time.sleep(min(POLL_S, self._idle_timeout_s / 4))

    def ack(self, sample_ids: Iterable[str]) -> None:
        for queue, ids in self._group(sample_ids):
            queue.ack(ids)
            self._forget(ids)

    def fail(self, sample_ids: Iterable[str], *, requeue: bool = False) -> None:
        for queue, ids in self._group(sample_ids):
            queue.fail(ids, requeue=requeue)
            self._forget(ids)
            if requeue:
                self._owners.update(dict.fromkeys(ids, queue))

    def close(self) -> None:
        for queue in self._queues:
            queue.close()

    def abort(self, error: BaseException) -> None:
        for queue in self._queues:
            queue.abort(error)

    def _take(self, count: int) -> list[SampleRef]:
        """Return what there is, from the queue after the one that gave last."""
        for offset in range(len(self._queues)):
            place = (self._turn + offset) % len(self._queues)
            if place in self._failures:
                continue
            queue = self._queues[place]
            try:
                while refs := queue.get(count, 0.0):
                    if new := self._select_new(queue, refs):
                        self._turn = place + 1
                        return new
            except StoreError as error:
                self._note_failure(place, error)
        return []

    def _select_new(self, queue: RefQueue, refs: Sequence[SampleRef]) -> list[SampleRef]:
        """Return the references that came through no other queue before; give the others up."""
        new = [ref for ref in refs if self._owners.get(ref.sample_id) is queue or self._seen.add(ref.sample_id)]
        taken = {ref.sample_id for ref in new}
        queue.fail([ref.sample_id for ref in refs if ref.sample_id not in taken])
        self._owners.update(dict.fromkeys(taken, queue))
        return new

    def _note_failure(self, place: int, error: StoreError) -> None:
        """Remember the failure of a channel. Raises it, or the first one, if no channel is left."""
        self._failures[place] = error
        if len(self._failures) == len(self._queues):
            raise next(iter(self._failures.values()))
        log.warning("the other channels go on: %s", error)

    def _group(self, sample_ids: Iterable[str]) -> list[tuple[RefQueue, list[str]]]:
        """Return samples by the queue that gave them. Raises ValueError if one is not handed out."""
        sample_ids = list(sample_ids)
        unknown = [each for each in sample_ids if each not in self._owners]
        if unknown or len(set(sample_ids)) < len(sample_ids):
            raise ValueError(f"samples {unknown or sample_ids} are not handed out, or named twice")
        groups: dict[int, tuple[RefQueue, list[str]]] = {}
        for each in sample_ids:
            queue = self._owners[each]
            groups.setdefault(id(queue), (queue, []))[1].append(each)
        return list(groups.values())

    def _forget(self, sample_ids: Iterable[str]) -> None:
        for each in sample_ids:
            del self._owners[each]
