"""Producers of a stream in arrival order: what a source gives is captured, stored, and committed as it comes."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from draftworks.capture.capture_plan import SampleJob, StreamPlan
from draftworks.capture.engine import TargetEngine
from draftworks.capture.session import Confirmation
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenRow
from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.features.contracts import FeatureSpec, KeyedFeatureStore, SampleRef
from draftworks.storage.identity import digest
from draftworks.stream.capture_worker import CaptureWorker, TaskOrder, WorkerSummary
from draftworks.stream.controller import PAGE, DataFlowController
from draftworks.stream.metadata_store import IDLE_TIMEOUT_S, InFlight, TaskLease, Watermark
from draftworks.stream.row_sources import RowSource, TaskLimits
from draftworks.stream.step_acks import FINISHED, FREE_AT, free_unused

SOURCE = "source"
"""The fact of a run that all tasks of its source are added; JSON of `SourceFact`."""
LEASED_AHEAD = 5
LOOK_S = 0.5
"""Between two looks for the end of the consumer."""
TOKENS = {"input_ids": "int64", "loss_mask": "bool"}
ShouldStop = Callable[[], bool]
Value = TypeVar("Value")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFact:
    """What a consumer has to know of its source: its size, and how much of it may have no features.

    Attributes:
        is_whole: whether all of its tasks are added.
        counts: of the rows of a source without an end, so far, by what became of them.
    """

    target: str
    samples: int
    max_failed_share: float
    global_batch_size: int
    is_whole: bool = True
    counts: dict[str, int] | None = None


class ArrivalOrder(TaskOrder):
    """The tasks of a source, in its order, as the watermark allows; until all are done, or the consumer has finished.

    Args:
        streams: names of the features to store, beside `input_ids` and `loss_mask`.
        watermark: limits what is leased, or committed and not acknowledged.
        idle_timeout_s: the longest wait in which the consumer does nothing.
        require_source: raises what keeps the source from being read in this process.
    """

    ahead = LEASED_AHEAD
    counts_keys = True

    def __init__(
        self,
        source: RowSource,
        run: CaptureRun,
        streams: Sequence[str],
        controller: DataFlowController,
        store: KeyedFeatureStore,
        watermark: Watermark,
        idle_timeout_s: float,
        require_source: Callable[[], None] = lambda: None,
    ) -> None:
        self.controller = controller
        self._require_source = require_source
        self._is_whole = False
        self._own_rows: dict[int, TokenRow] = {}
        self.rows = self._own_rows
        self.size = source.size
        self.calls_engine = source.calls_engine
        self._source = source
        self._run = run
        self._streams = streams
        self._plan = StreamPlan.of(run)
        self._store = store
        self._watermark = watermark
        self._idle_timeout_s = idle_timeout_s
        self._rows_of: dict[tuple[str, int], list[int]] = {}
        self._next_row = 0
        self._looked, self._left_before = float("-inf"), None
        self._moved, self._state = time.monotonic(), None

    def lease(self, worker: str, limit: int) -> Sequence[TaskLease] | None:
        """Lease the next tasks.

        Raises:
            StoreError: the consumer has failed, or does nothing while there is no room.
        """
        if self._has_finished():
            return None
        self._require_source()
        leases = self.controller.lease_tasks(worker, limit, watermark=self._watermark)
        if leases:
            self._moved = time.monotonic()
            return leases
        counts = self.controller.count_tasks()
        if not counts.open:
            self._moved = time.monotonic()  # what has no end yet is waited for by the trainer
            return None if self._has_all_tasks() else ()
        self._require_moving(counts, self.controller.read_consumers())
        return ()

    def list_jobs(self, lease: TaskLease, load_engine: Callable[[], TargetEngine]) -> list[SampleJob]:
        engine = load_engine() if self.calls_engine else None
        rows = self._source.make_rows(lease.task, engine)
        if lease.attempt > 1:  # another worker may have committed a part of it
            new = set(self.controller.find_uncommitted([row.sample_id for row in rows]))
            rows = [row for row in rows if row.sample_id in new]
        numbers = range(self._next_row, self._next_row + len(rows))
        self._own_rows.update(zip(numbers, rows, strict=True))
        self._rows_of[lease.task.task_id, lease.attempt] = list(numbers)
        self._next_row += len(rows)
        keys_of = [self._select(self._plan.make_keys(row.token_digest)) for row in rows]
        missing = set(self._store.find_missing(key for keys in keys_of for key in keys.values()))
        return [
            SampleJob(
                *(number, row.sample_id, len(row.input_ids), keys),
                tuple(name for name, key in keys.items() if key in missing),
            )
            for number, row, keys in zip(numbers, rows, keys_of, strict=True)
        ]

    def list_refs(self, lease: TaskLease, failed: frozenset[str]) -> list[SampleRef]:
        """Return the references of a task's samples, whose tokens are stored here."""
        # By attempt: a worker may lease a task again, of which its own lease has run out.
        rows = [self._own_rows.pop(number) for number in self._rows_of.pop((lease.task.task_id, lease.attempt))]
        return [self._store_tokens(row) for row in rows if row.sample_id not in failed]

    def _store_tokens(self, row: TokenRow) -> SampleRef:
        count = len(row.input_ids)
        tensors: dict[str, Tensor] = {
            "input_ids": torch.from_numpy(np.asarray(row.input_ids, dtype=np.int64)),
            "loss_mask": torch.from_numpy(np.array(row.loss_mask, dtype=np.bool_)),
        }
        supervised = digest([row.token_digest, np.packbits(row.loss_mask).tobytes().hex()])
        specs = {name: FeatureSpec(name, (count,), dtype) for name, dtype in TOKENS.items()}
        specs |= self._select(self._plan.make_specs(count))
        ref = SampleRef(
            row.sample_id,
            self.controller.run_id,
            row.sample_id,
            self._store.uri,
            {
                "input_ids": digest(["input_ids", row.token_digest]),
                "loss_mask": digest(["loss_mask", supervised]),
                **self._select(self._plan.make_keys(row.token_digest)),
            },
            specs,
            target_model_version=self._run.target.digest,
            tokenizer_version=self._run.target.tokenizer_digest,
            num_tokens=count,
            estimated_bytes=sum(spec.nbytes for spec in specs.values()),
        )
        self._store.put(ref.select(tuple(TOKENS)), tensors)
        return ref

    def _select(self, by_stream: dict[str, Value]) -> dict[str, Value]:
        return {name: value for name, value in by_stream.items() if name in self._streams}

    def _has_finished(self) -> bool:
        """Whether the consumer needs no more. Raises StoreError if it has failed since this producer began."""
        if time.monotonic() - self._looked < LOOK_S:
            return False
        self._looked = time.monotonic()
        progress = self.controller.read_consumers().get(self.controller.consumer)
        left = "" if progress is None else progress.left
        if left in ("", FINISHED):
            self._left_before = ""
        elif self._left_before is None:
            self._left_before = left  # that of a consumer which is to be started again
        elif left != self._left_before:
            raise StoreError(f"run {self.controller.run_id}: its consumer {self.controller.consumer} has left: {left}")
        return left == FINISHED

    def _has_all_tasks(self) -> bool:
        """Whether no tasks will be added; looked at after they were counted, and counted again if it is news."""
        if self._is_whole:
            return True
        known = self.controller.read_facts().get(SOURCE)
        self._is_whole = known is not None and json.loads(known)["is_whole"]
        return self._is_whole and not self.controller.count_tasks().open

    def _require_moving(self, *state: object) -> None:
        if state != self._state:
            self._state, self._moved = state, time.monotonic()
        if time.monotonic() - self._moved > self._idle_timeout_s:
            raise StoreError(
                f"run {self.controller.run_id}: nothing was consumed for {self._idle_timeout_s:g} s, with no room below "
                f"{self._watermark}. Consumer {self.controller.consumer} hangs, or has ended: look at its log, or raise "
                "idle_timeout_s"
            )


@dataclass(frozen=True, kw_only=True)
class ProducerParts:
    """What producers of a stream need beside their store and their control plane.

    Attributes:
        capture: target, taps and settings of the capture; its folders are not used.
        streams: names of the features to store, as `DraftStrategy.feature_names` of the draft that is trained.
        load_engine: called once by each worker. Workers that share an engine need one that several threads may use.
        workers: threads that share the tasks.
        confirm: see `CaptureWorker`.

    Raises:
        ConfigError: a stream that the capture does not give, or no workers.
    """

    source: RowSource
    capture: CaptureRun
    streams: Sequence[str]
    load_engine: Callable[[], TargetEngine]
    workers: int = 1
    confirm: Confirmation | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.streams if name not in StreamPlan.of(self.capture).names]
        if unknown:
            names = StreamPlan.of(self.capture).names
            raise ConfigError(f"streams: expected some of {', '.join(names)}, which the capture gives, found {unknown}")
        if self.workers < 1:
            raise ConfigError(f"workers: expected at least 1, found {self.workers}")

    @cached_property
    def bytes_per_token(self) -> int:
        specs = StreamPlan.of(self.capture).make_specs(1)
        tokens = [FeatureSpec(name, (1,), dtype) for name, dtype in TOKENS.items()]
        return sum(spec.nbytes for spec in [*tokens, *(specs[name] for name in self.streams)])

    def make_producer(
        self,
        controller: DataFlowController,
        store: KeyedFeatureStore,
        watermark: Watermark,
        global_batch_size: int,
        name: str = "producer",
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> OnlineProducer:
        """Return the producers of a stream whose trainer takes `global_batch_size` samples a step.

        Raises:
            ConfigError: the watermark is below a global batch of the longest samples, or there is no time to wait.
        """
        if idle_timeout_s <= 0:
            raise ConfigError(f"idle_timeout_s: expected more than 0, found {idle_timeout_s:g}")
        largest, size = self.source.measure(global_batch_size) * self.bytes_per_token, self.bytes_per_token
        watermark.require_batch(InFlight(global_batch_size, largest, 1))
        limits = watermark.for_batches_of(global_batch_size)
        rest = self.source.measure(global_batch_size - 1) * size
        task = TaskLimits(
            size,
            2**62 if limits.samples is None else limits.samples - global_batch_size + 1,
            2**62 if limits.bytes is None else limits.bytes - rest,
        )
        return OnlineProducer(self, controller, store, limits, task, global_batch_size, name, idle_timeout_s)


@dataclass(frozen=True)
class OnlineProducer:
    """Producers of one stream, ready to be driven by `drive_producer`."""

    parts: ProducerParts
    controller: DataFlowController
    store: KeyedFeatureStore
    watermark: Watermark
    task: TaskLimits
    global_batch_size: int
    name: str
    idle_timeout_s: float

    @property
    def fact(self) -> SourceFact:
        """What a consumer has to know of the source."""
        capture = self.parts.capture
        return SourceFact(
            capture.target.name, self.parts.source.size, capture.capture.max_failed_share, self.global_batch_size
        )

    def add_tasks(self) -> None:
        """Add the tasks of the source, unless another producer has; record its end, from which on no more come.

        Raises:
            ConfigError: other producers of the run were told another global batch.
        """
        fact = self.fact
        known = self.controller.read_facts().get(SOURCE)
        if known is not None:
            require_batch_of(json.loads(known)["global_batch_size"], self.global_batch_size, self.controller.run_id)
            return
        tasks = self.parts.source.list_tasks(self.controller.run_id, self.task)
        while page := list(islice(tasks, PAGE)):
            self.controller.add_tasks(page)
        self.controller.record_fact(SOURCE, json.dumps(vars(fact)))

    def make_worker(
        self, number: int, should_stop: ShouldStop, require_source: Callable[[], None] = lambda: None
    ) -> CaptureWorker:
        parts = self.parts
        order = ArrivalOrder(
            *(parts.source, parts.capture, parts.streams, self.controller, self.store),
            *(self.watermark, self.idle_timeout_s, require_source),
        )
        name = f"{self.name}-{number}"
        return CaptureWorker(name, parts.capture, order, self.store, parts.load_engine, should_stop, parts.confirm)

    def free_rest(self) -> bool:
        """Free what was committed after a consumer that has finished looked for the last time; return whether it has."""
        progress = self.controller.read_consumers().get(self.controller.consumer)
        if progress is None or progress.left != FINISHED:
            return False
        if self.controller.read_facts().get(FREE_AT) != "never":
            free_unused(self.controller, self.store, everything=True)
        return True


def drive_producer(producer: OnlineProducer, should_stop: ShouldStop = lambda: False) -> WorkerSummary:
    """Run all workers, a thread each, until the source is exhausted, the consumer has finished or `should_stop`.

    A worker that fails is dropped, and its task goes to another one, of this process or of one that comes later.

    Raises:
        DraftworksError: the first error, if tasks are left and no worker could go on. Errors after `should_stop` are
            logged only.
    """
    failures: list[BaseException] = []
    controller = producer.controller

    def work(worker: CaptureWorker) -> None:
        try:
            worker.run()
        except BaseException as error:
            reason = error if isinstance(error, DraftworksError) else repr(error)
            log.warning("worker %s of a stream has failed: %s", worker.name, reason)
            failures.append(error)

    producer.add_tasks()
    workers = [producer.make_worker(number, should_stop) for number in range(producer.parts.workers)]
    _run_all(work, workers)
    if producer.free_rest():
        return sum((worker.summary for worker in workers), WorkerSummary())
    if failures and not should_stop() and controller.count_tasks().open:
        raise failures[0]
    return sum((worker.summary for worker in workers), WorkerSummary())


def require_batch_of(told: int, found: int, run_id: str) -> None:
    """Raise ConfigError unless a stream's sides were told one global batch: the watermark is checked by it."""
    if told != found:
        raise ConfigError(
            f"run {run_id}: expected global_batch_size {told}, as its producers were told, found {found}. Give producers "
            "and trainer the same"
        )


def _run_all(work: Callable[[CaptureWorker], None], workers: Iterable[CaptureWorker]) -> None:
    def in_background(worker: CaptureWorker) -> None:
        block_stop_signals()
        work(worker)

    first, *others = workers
    threads = [threading.Thread(target=in_background, args=[each], name=each.name, daemon=True) for each in others]
    for thread in threads:
        thread.start()
    work(first)
    for thread in threads:
        thread.join()
