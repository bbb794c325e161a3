"""Arrival order: one process cuts whole global batches from a queue, and every rank gets the same ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from draftworks.dataflow.order_log import OrderLog
from draftworks.dataflow.ref_queues import RefQueue
from draftworks.dataflow.ref_set import RefSet
from draftworks.dataflow.watermark import InFlight
from draftworks.distributed.collectives import broadcast_from_rank_0, describe_error, get_rank
from draftworks.distributed.decisions import Decision, Verdict, agree
from draftworks.errors import DraftworksError, StoreError
from draftworks.features.contracts import SampleRef

if TYPE_CHECKING:
    import torch.distributed as dist

WAIT_S = 1.0
"""The longest that ranks wait for references before they look for stop signals again."""


class RefDistributor:
    """Deals the references of a queue to all ranks, a global batch at a time, in the order in which they arrive.

    The queue leaves out second references of a sample before batches are cut, so all batches are whole. References that
    do not fill a last batch are dropped. End, stop and failure are decided by all ranks together, so that all of them
    train the same steps. Global batches do not depend on the number of ranks or on the pace of arrival.

    Args:
        queue: on rank 0; other ranks have None.
        log: on rank 0, opened with `keep_steps` = `start_step`.
        start_step: optimizer steps that a resumed training has behind it. The queue skips their samples.
        stop_signal: number of the signal that asks this rank to stop, or 0.
        group: for small Python values; by default the group of all ranks.

    Raises:
        ConfigError: the watermark of the queue is below one global batch.

    Attributes:
        stopped_by: the signal that ended the stream on some rank; 0 if none did.
        dropped: on rank 0, the references that did not fill a last batch.
    """

    def __init__(
        self,
        queue: RefQueue | None,
        global_batch_size: int,
        log: OrderLog | None = None,
        start_step: int = 0,
        stop_signal: Callable[[], int] = lambda: 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if queue is not None:
            queue.require_batch(InFlight(global_batch_size))
        self.global_batch_size = global_batch_size
        self.step = start_step
        self.is_over = False
        self.stopped_by = 0
        self.dropped: tuple[SampleRef, ...] = ()
        self._queue = queue
        self._log = log
        self._stop_signal = stop_signal
        self._group = group
        self._pending: list[SampleRef] = []
        self._unacknowledged: deque[tuple[SampleRef, ...]] = deque()

    def next_step(self, wait: bool = True) -> tuple[SampleRef, ...] | None:
        """Return the references of the next global batch; None if the stream is over, or none is ready and not `wait`.

        A collective.

        Raises:
            DraftworksError: on every rank, what made the producers, the queue or the log fail.
        """
        while not self.is_over:
            own, error = self._decide(WAIT_S if wait else 0.0)
            agreed = agree(own, error, self._group)
            if agreed.verdict is Verdict.GO:
                return self._deal()
            if agreed.verdict is Verdict.WAIT:
                if not wait:
                    return None
                continue
            self.is_over, self.stopped_by = True, agreed.signum
            if agreed.verdict is Verdict.END:
                self._drop_rest()
        return None

    @property
    def oldest_step(self) -> tuple[SampleRef, ...]:
        """On rank 0, the references of the oldest dealt step that is not acknowledged; none elsewhere."""
        return self._unacknowledged[0] if self._unacknowledged else ()

    def ack_step(self) -> None:
        """Acknowledge the oldest dealt step at the queue, once its optimizer step is made. Not a collective."""
        if self._queue is not None:
            self._queue.ack(ref.sample_id for ref in self._unacknowledged[0])
            self._unacknowledged.popleft()

    def _decide(self, wait_s: float) -> tuple[Decision, Exception | None]:
        signum = self._stop_signal()
        if signum:
            return Decision(Verdict.STOP, signum), None
        if self._queue is None:
            return Decision(Verdict.GO), None
        try:
            return Decision(self._fill_batch(self._queue, time.monotonic() + wait_s)), None
        except (OSError, ValueError, DraftworksError) as error:
            return Decision(Verdict.FAIL), error

    def _fill_batch(self, queue: RefQueue, until: float) -> Verdict:
        """Collect references until the batch is whole, the queue is drained or the time is up."""
        while missing := self.global_batch_size - len(self._pending):
            refs = queue.get(missing, max(0.0, until - time.monotonic()))
            self._pending += refs
            if not refs:
                return Verdict.END if queue.is_drained else Verdict.WAIT
        return Verdict.GO

    def _deal(self) -> tuple[SampleRef, ...]:
        """Log the batch on rank 0, then give it to all ranks. A collective."""
        refs, failure, error = None, None, None
        if get_rank() == 0:
            try:
                if self._log is not None:
                    self._log.append(self.step + 1, [ref.sample_id for ref in self._pending])
                refs = RefSet.of(self._pending)
            except (OSError, TypeError, ValueError, DraftworksError) as caught:
                error, failure = caught, describe_error(caught)
        refs, failure = broadcast_from_rank_0((refs, failure), self._group)
        if error is not None:
            raise error
        if failure is not None:
            raise StoreError(f"rank 0: {failure}")
        self.step += 1
        if self._queue is None:
            return refs.refs()
        dealt, self._pending = tuple(self._pending), []
        self._unacknowledged.append(dealt)
        return dealt

    def _drop_rest(self) -> None:
        self.dropped, self._pending = tuple(self._pending), []
        if self._queue is not None:
            self._queue.fail([ref.sample_id for ref in self.dropped])
