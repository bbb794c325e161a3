"""A training in arrival order: committed references become optimizer steps, on any number of ranks."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from draftworks.capture.verify import require_few_failed
from draftworks.config.registry_files import TrainingSpec
from draftworks.data.rejected import RejectedSample
from draftworks.distributed.collectives import (
    Decision,
    Verdict,
    agree,
    broadcast_from_rank_0,
    get_rank,
    get_world_size,
    run_on_every_rank,
)
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.features.loader import QueueDataLoader, packed_steps, padded_steps
from draftworks.features.schedule import PackLimits
from draftworks.stream.arrival_producer import SOURCE, SourceFact, require_batch_of
from draftworks.stream.capture_worker import LONGEST_POLL_S, POLL_S
from draftworks.stream.controller import PAGE, ControlPlane, DataFlowController
from draftworks.stream.metadata_store import IDLE_TIMEOUT_S, DeadLetter, TaskCounts
from draftworks.stream.ref_set import RefSet
from draftworks.stream.step_acks import FreeAt, StepAcks

if TYPE_CHECKING:
    import torch.distributed as dist

WAIT_S = 1.0
"""The longest that ranks wait for references before they look for stop signals again."""
log = logging.getLogger(__name__)


class RefQueue(Protocol):
    """References in order, each once."""

    @property
    def is_drained(self) -> bool:
        """Whether nothing more comes."""
        ...

    def get(self, count: int, wait_s: float) -> list[SampleRef]:
        """Return the next references, at most `count`; none if none came within `wait_s` seconds, or no more will."""
        ...


class RefReader:
    """The references of a run that its consumer has not acknowledged, in the order in which they were committed.

    A cursor over the control plane: any number of producers commit, each sample is there once, and one that was read and
    not acknowledged is read again by the reader that follows.

    Args:
        global_batch_size: what the producers must have been told, too.
        idle_timeout_s: the longest wait in which producers do nothing.
        on_idle: called before a wait.

    Raises:
        ConfigError: there is no time to wait.
    """

    def __init__(
        self,
        controller: DataFlowController,
        global_batch_size: int,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        if idle_timeout_s <= 0:
            raise ConfigError(f"idle_timeout_s: expected more than 0, found {idle_timeout_s:g}")
        self.is_drained = False
        self.on_idle = on_idle
        self._controller = controller
        self._global_batch_size = global_batch_size
        self._idle_timeout_s = idle_timeout_s
        self._cursor = 0
        self._waiting: deque[SampleRef] = deque()
        self._source: SourceFact | None = None
        self._counts = TaskCounts()
        self._moved = time.monotonic()
        self._failure: BaseException | None = None

    def get(self, count: int, wait_s: float) -> list[SampleRef]:
        """Return the next references, at most `count`; none if none came within `wait_s` seconds, or no more will.

        Raises:
            CaptureError: more samples have no features than `capture.max_failed_share` allows, over the whole run.
            ConfigError: the producers were told another global batch.
            StoreError: the idle timeout has passed.
            DraftworksError: what made the producers of this process fail.
        """
        until, pause = time.monotonic() + wait_s, POLL_S
        while not self._waiting and not self._read_page():
            if self.is_drained or time.monotonic() >= until:
                return []
            self.on_idle()
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(2 * pause, LONGEST_POLL_S)
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def find_source(self) -> None:
        """Look for what the producers have said. Raises ConfigError if they were told another global batch."""
        known = self._controller.read_facts().get(SOURCE)
        if known is not None:
            self._source = SourceFact(**json.loads(known))
            require_batch_of(self._source.global_batch_size, self._global_batch_size, self._controller.run_id)

    def give_back(self, refs: Sequence[SampleRef]) -> None:
        """Return references that were read and are not trained: they are the next to be read."""
        self._waiting.extendleft(reversed(refs))

    def fail(self, error: BaseException) -> None:
        """Raise an error of this process's producers from `get`; called from their thread."""
        self._failure = error

    def _read_page(self) -> bool:
        """Read what was committed since; look whether more comes if nothing was. Returns whether there is something."""
        if self._failure is not None:
            raise self._failure
        counts = None
        page = self._controller.read_refs(self._cursor, PAGE, acked=False)
        if not page.refs:
            # Counted before another look: the last task ends in the transaction that commits its references.
            counts = self._look()
            page = self._controller.read_refs(self._cursor, PAGE, acked=False)
        self._cursor = page.cursor
        self._waiting.extend(page.refs)
        if page.refs:
            self._moved = time.monotonic()
        elif counts is not None and self._source is not None and self._source.is_whole and not counts.open:
            self.is_drained = True
        return bool(page.refs)

    def _look(self) -> TaskCounts:
        if self._source is None or not self._source.is_whole:
            self.find_source()  # before the count: the fact is recorded after the last task is added
        counts = self._controller.count_tasks()
        if self._source is not None and counts.dead > self._counts.dead:
            self._require_few_lost(self._source, self._controller.read_dead_letters())
        if counts != self._counts:
            self._counts, self._moved = counts, time.monotonic()
        if time.monotonic() - self._moved > self._idle_timeout_s:
            raise StoreError(
                f"run {self._controller.run_id}: no reference came for {self._idle_timeout_s:g} s: {self._describe(counts)}. "
                "Look at the producers' logs, or raise idle_timeout_s"
            )
        return counts

    def _require_few_lost(self, source: SourceFact, letters: Sequence[DeadLetter]) -> None:
        lost = [
            RejectedSample(sample_id, letter.reasons[-1])
            for letter in letters
            for sample_id in letter.lost_samples or _name_prompts(letter)
        ]
        for each in lost:
            log.warning("sample %s is left out: %s", each.sample_id, each.reason)
        if lost:
            require_few_failed(source.target, source.max_failed_share, lost, source.samples)

    def _describe(self, counts: TaskCounts) -> str:
        if self._source is None:
            return "no producer has come"
        here = "a producer is at work" if counts.leased else "no producer is at work"
        return f"{here}, {counts.pending} tasks are not taken, {counts.leased} are, {counts.done} are done"


class ListedRefs:
    """References in the order of a list, such as that of an earlier training, to repeat it.

    Args:
        refs: those of the run.
        order: sample ids in the order of training, see `DataFlowController.read_order`.

    Raises:
        StoreError: a sample has no reference.
    """

    def __init__(self, refs: Sequence[SampleRef], order: Sequence[str]) -> None:
        by_id = {ref.sample_id: ref for ref in refs}
        missing = [sample_id for sample_id in order if sample_id not in by_id]
        if missing:
            raise StoreError(
                f"the order names {len(missing)} samples without a reference, such as {missing[0]}: the training cannot be "
                "repeated without them"
            )
        self._left = deque(by_id[sample_id] for sample_id in order)

    @property
    def is_drained(self) -> bool:
        return not self._left

    def get(self, count: int, wait_s: float) -> list[SampleRef]:
        return [self._left.popleft() for _ in range(min(count, len(self._left)))]


class RefDistributor:
    """Deals references to all ranks, a global batch at a time, in the order in which they arrive.

    References that do not fill a last batch are dropped. End, stop and failure are decided by all ranks together, so
    that all of them train the same steps. Global batches do not depend on the number of ranks or on the pace of arrival.

    Args:
        queue: on rank 0; other ranks have None.
        start_step: optimizer steps that a resumed training has behind it.
        stop_signal: number of the signal that asks this rank to stop, or 0.
        group: for small Python values; by default the group of all ranks.

    Attributes:
        stopped_by: the signal that ended the stream on some rank; 0 if none did.
        dropped: on rank 0, the references that did not fill a last batch.
    """

    def __init__(
        self,
        queue: RefQueue | None,
        global_batch_size: int,
        start_step: int = 0,
        stop_signal: Callable[[], int] = lambda: 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.global_batch_size = global_batch_size
        self.step = start_step
        self.is_over = False
        self.stopped_by = 0
        self.dropped: tuple[SampleRef, ...] = ()
        self._queue = queue
        self._stop_signal = stop_signal
        self._group = group
        self._pending: list[SampleRef] = []
        self._dealt: dict[int, tuple[SampleRef, ...]] = {}

    def next_step(self, wait: bool = True) -> tuple[SampleRef, ...] | None:
        """Return the references of the next global batch; None if the stream is over, or none is ready and not `wait`.

        A collective.

        Raises:
            DraftworksError: on every rank, what made the producers or the queue fail.
        """
        while not self.is_over:
            decision, error = self._decide(WAIT_S if wait else 0.0)
            agreed = agree(decision, error, self._group)
            if agreed.verdict is Verdict.GO:
                return self._deal()
            if agreed.verdict is Verdict.WAIT:
                if not wait:
                    return None
                continue
            self.is_over, self.stopped_by = True, agreed.signum
            if agreed.verdict is Verdict.END:
                self.dropped, self._pending = tuple(self._pending), []
        return None

    def take_step(self, global_step: int) -> tuple[SampleRef, ...]:
        """Return, on rank 0, the references that a step was dealt, which are forgotten then."""
        return self._dealt.pop(global_step)

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
        """Collect references until the batch is whole, no more come or the time is up."""
        while missing := self.global_batch_size - len(self._pending):
            refs = queue.get(missing, max(0.0, until - time.monotonic()))
            self._pending += refs
            if not refs:
                return Verdict.END if queue.is_drained else Verdict.WAIT
        return Verdict.GO

    def _deal(self) -> tuple[SampleRef, ...]:
        """Give the batch to all ranks. A collective."""
        self.step += 1
        packed = broadcast_from_rank_0(RefSet.of(self._pending) if get_rank() == 0 else None, self._group)
        if self._queue is None:
            return packed.refs()
        dealt = self._dealt[self.step] = tuple(self._pending)
        self._pending = []
        return dealt


class ArrivalStream:
    """A rank's end of a training in arrival order: what its loader reads from, and what listens to its steps.

    What each step took is in the control plane, with its acknowledgement: `read_order` of its controller.

    Args:
        plane: used on rank 0.
        store: holds, for each sample, the features that the strategy reads, `input_ids` and `loss_mask`.
        start_step: the optimizer step of the checkpoint from which the training resumes.
        queue: on rank 0, instead of the run's own references; such a training acknowledges nothing and frees nothing.

    Raises:
        ConfigError: a global batch cannot be divided among micro-batches and ranks, or there is no time to wait.
    """

    def __init__(
        self,
        store: KeyedFeatureStore,
        strategy: DraftStrategy,
        training: TrainingSpec,
        plane: ControlPlane,
        start_step: int = 0,
        free_at: FreeAt = "step",
        stop_signal: Callable[[], int] = lambda: 0,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        queue: RefQueue | None = None,
        prefetch: int = 2,
    ) -> None:
        rank, world, size = get_rank(), get_world_size(), training.global_batch_size
        if training.pack_tokens is None:
            split, collate = padded_steps(size, training.micro_batch_size, rank, world), strategy.collate
        else:
            limits = PackLimits(training.pack_tokens, training.pack_overlong)
            split, collate = packed_steps(size, limits, rank, world), strategy.pack
        self.reader = RefReader(plane.controller, size, idle_timeout_s)
        if queue is None:
            run_on_every_rank(self.reader.find_source)
        chosen = (queue or self.reader) if rank == 0 else None
        self.distributor = RefDistributor(chosen, size, start_step, stop_signal)
        self.loader = QueueDataLoader(self.distributor, store, split, collate, prefetch)
        self.acks = None
        if queue is None:
            self.acks = StepAcks(plane, store, self.distributor.take_step, free_at=free_at)
            self.reader.on_idle = self.acks.confirm
        self._start_step = start_step
        self._store = store

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Context of the training, see `StepAcks.follow`. A collective."""
        if self.acks is None:
            yield
            return
        with self.acks.follow(self._start_step, self._store):
            yield

    def finish(self) -> None:
        """Free what is left, and let the producers end, once the training is done and was not stopped."""
        if self.acks is not None:
            self.acks.finish()


def _name_prompts(letter: DeadLetter) -> list[str]:
    """Return names for the samples of a task that makes them from prompts, as many as it has prompts."""
    if letter.task.sample_ids:
        return []
    return [f"{letter.task.task_id} ({number})" for number in range((letter.task.size or (1, 0))[0])]
