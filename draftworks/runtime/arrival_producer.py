"""Producers of a stream in arrival order: they capture what a source gives, store it, and publish references."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftworks.capture.engine import TargetEngine, find_backend
from draftworks.capture.plan import SampleJob, StreamPlan
from draftworks.capture.session import Confirmation
from draftworks.capture.verify import CapturedSample, SoundCapture, verify_head_of
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenRow
from draftworks.dataflow.control_plane import ControlPlane
from draftworks.dataflow.controller import PAGE
from draftworks.dataflow.tasks import PromptTask, TaskLease
from draftworks.dataflow.watermark import InFlight
from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.errors import DraftworksError, StoreError
from draftworks.features.contracts import FeatureStore, KeyedFeatureStore, SampleRef
from draftworks.runtime.lease_keeper import LeaseKeeper
from draftworks.runtime.ref_sinks import RefSink, ShouldStop
from draftworks.runtime.row_sources import RowSource
from draftworks.storage.identity import digest

POLL_S = 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProducerSummary:
    """What producers of a stream did: tasks ended, samples published and those with no valid features, tokens, bytes."""

    tasks: int = 0
    published: int = 0
    failed: int = 0
    tokens: int = 0
    nbytes: int = 0

    def __add__(self, other: ProducerSummary) -> ProducerSummary:
        return ProducerSummary(
            self.tasks + other.tasks,
            self.published + other.published,
            self.failed + other.failed,
            self.tokens + other.tokens,
            self.nbytes + other.nbytes,
        )


class TaskPool:
    """The tasks of a source, shared by leases; and the references that came of them, where the control plane is durable.

    Args:
        plane: without `durable_ack` its controller keeps tasks only, so that its memory does not grow with references.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._controller = plane.controller
        self.retains = plane.durable_ack

    @property
    def run_id(self) -> str:
        return self._controller.run_id

    @property
    def is_drained(self) -> bool:
        """Whether no task is left, not even one that a worker may give back."""
        return self._controller.count_tasks().open == 0

    def add(self, tasks: Iterable[PromptTask]) -> None:
        """Add tasks; those that are known are left as they are."""
        page: list[PromptTask] = []
        for task in tasks:
            page.append(task)
            if len(page) == PAGE:
                self._controller.add_tasks(page)
                page = []
        self._controller.add_tasks(page)

    def lease(self, worker: str) -> TaskLease | None:
        leases = self._controller.lease_tasks(worker, limit=1)
        return leases[0] if leases else None

    def make_keeper(self) -> LeaseKeeper:
        return LeaseKeeper(self._controller)

    def holds(self, lease: TaskLease) -> bool:
        """Whether the lease has not gone to another worker."""
        return bool(self._controller.renew_leases([lease]))

    def commit(self, refs: Sequence[SampleRef], done: TaskLease | None) -> None:
        """Commit references; with the last ones, end their task."""
        self._controller.commit_samples(refs if self.retains else [], [] if done is None else [done])

    def give_back(self, lease: TaskLease, reason: str) -> None:
        self._controller.fail_task(lease, reason)

    def find_new(self, sample_ids: Sequence[str]) -> set[str]:
        """Return the samples that no worker has committed."""
        return set(self._controller.find_uncommitted(sample_ids) if self.retains else sample_ids)

    def iterate_committed(self) -> Iterator[list[SampleRef]]:
        """Yield all committed references, in pages."""
        page = self._controller.read_refs(0)
        while self.retains and page.refs:
            yield list(page.refs)
            page = self._controller.read_refs(page.cursor)


class ArrivalWorker:
    """Takes tasks of a source, runs their samples through the target, stores what is sound, and publishes it.

    References are committed before they are published, and whoever begins publishes what was committed and not
    published: so no sample is lost with a killed producer, and none is in the stream twice.

    Args:
        name: of this worker, for leases and messages.
        run: the target, taps and settings of the capture.
        streams: names of the features to store, beside `input_ids` and `loss_mask`.
        store: of any kind; one that consumes once frees a sample when its step is acknowledged.
        load_engine: called once, when there is something to capture.
        confirm: check of an engine that another party can change, called before samples are stored.
    """

    def __init__(
        self,
        name: str,
        source: RowSource,
        run: CaptureRun,
        streams: Sequence[str],
        pool: TaskPool,
        store: FeatureStore,
        sink: RefSink,
        load_engine: Callable[[], TargetEngine],
        confirm: Confirmation | None = None,
    ) -> None:
        self.name = name
        self.summary = ProducerSummary()
        self._source = source
        self._run = run
        self._streams = tuple(streams)
        self._pool = pool
        self._store = store
        self._sink = sink
        self._load_engine = load_engine
        self._confirm = confirm
        self._engine: TargetEngine | None = None
        self._verified = False
        self._plan = StreamPlan.of(run)
        self._whole_batches = find_backend(run.capture.backend).repeatable
        self._keeper = pool.make_keeper()
        self._rows: list[TokenRow] = []
        self._sound = SoundCapture(run, self._plan, self._rows, source.size)

    def run(self, should_stop: ShouldStop) -> None:
        """Work until no task is left, nothing more is wanted, or `should_stop`.

        Raises:
            CaptureError: more samples failed than `capture.max_failed_share` allows.
            EngineError, StoreError: the engine, the store or the stream cannot go on. The leased task goes back to the
                pool.
        """
        with self._keeper.renewing():
            while not should_stop() and not self._sink.is_over:
                lease = self._pool.lease(self.name)
                if lease is not None:
                    self._work(lease, should_stop)
                elif self._pool.is_drained:
                    return
                else:
                    time.sleep(POLL_S)  # another worker may give a task back

    def _work(self, lease: TaskLease, should_stop: ShouldStop) -> None:
        self._keeper.add(lease)
        try:
            engine = self._engine = self._engine or self._load_engine()
            rows = self._source.make_rows(lease.task, engine)
            new = self._find_new(rows)
            captured = self._capture(engine, rows, new)
            delivered = self._deliver(lease, captured, should_stop)
        except BaseException as error:
            self._pool.give_back(lease, f"worker {self.name}: {_describe(error)}")
            raise
        finally:
            self._keeper.drop(lease)
        if delivered:
            self.summary += ProducerSummary(tasks=1, failed=len(new) - len(captured))
        else:
            self._pool.give_back(lease, f"worker {self.name} was told to stop, or took too long")

    def _find_new(self, rows: Sequence[TokenRow]) -> set[str]:
        """Return the samples that are neither committed nor in the stream."""
        new = self._pool.find_new([row.sample_id for row in rows])
        return {sample_id for sample_id in new if not self._sink.has_seen(sample_id)}

    def _capture(self, engine: TargetEngine, rows: Sequence[TokenRow], new: Collection[str]) -> list[CapturedSample]:
        """Return the new samples whose features are valid, in the order of `rows`.

        A backend whose batches are repeatable gets the whole batch again if anything of it is new, because the
        composition of a batch decides the last bits of its features.
        """
        self._rows[:] = rows if self._whole_batches and new else [row for row in rows if row.sample_id in new]
        jobs = [self._make_job(index, row, new) for index, row in enumerate(self._rows)]
        captured = self._sound.capture(engine, jobs) if jobs else []
        if captured and not self._verified:
            verify_head_of(engine, captured)
            self._verified = True
        if self._confirm is not None and captured:
            self._confirm(engine)
        return captured

    def _make_job(self, index: int, row: TokenRow, new: Collection[str]) -> SampleJob:
        keys = self._plan.make_keys(row.token_digest)
        missing = self._streams if row.sample_id in new else ()
        return SampleJob(index, row.sample_id, len(row.input_ids), keys, missing)

    def _deliver(self, lease: TaskLease, captured: Sequence[CapturedSample], should_stop: ShouldStop) -> bool:
        """Store, commit and publish samples as there is room.

        False if it was told to stop before the last, or took so long that another worker has the task.
        """
        left = list(captured)
        with self._sink.lock:
            while left:
                tensors = [self._make_tensors(each) for each in left]
                sizes = [InFlight(1, sum(tensor.nbytes for tensor in each.values())) for each in tensors]
                count = self._sink.reserve(sizes, should_stop)
                if count == 0 or not self._pool.holds(lease):
                    return False
                refs = [self._put(each, *pair) for each, pair in zip(left[:count], zip(tensors, sizes), strict=False)]
                left = left[count:]
                self._pool.commit([replace(ref, source_task_id=lease.task.task_id) for ref in refs], None)
                self._sink.publish(refs)
        self._pool.commit([], lease)
        return True

    def _make_tensors(self, captured: CapturedSample) -> dict[str, Tensor]:
        row = self._rows[captured.job.row]
        tokens = {
            "input_ids": torch.from_numpy(np.asarray(row.input_ids, dtype=np.int64)),
            "loss_mask": torch.from_numpy(np.array(row.loss_mask, dtype=np.bool_)),
        }
        return {**tokens, **captured.encode_missing(self._plan)}

    def _put(self, captured: CapturedSample, tensors: dict[str, Tensor], size: InFlight) -> SampleRef:
        job = captured.job
        ref = SampleRef(
            job.sample_id,
            self._pool.run_id,
            job.sample_id,
            "",
            {name: job.keys.get(name) or _make_key(name, tensor) for name, tensor in tensors.items()},
            {},
            target_model_version=self._run.target.digest,
            tokenizer_version=self._run.target.tokenizer_digest,
            num_tokens=job.num_tokens,
            estimated_bytes=size.bytes,
        )
        stored = self._store.put(ref, tensors)
        if isinstance(self._store, KeyedFeatureStore):
            self._store.flush()
        self.summary += ProducerSummary(published=1, tokens=job.num_tokens, nbytes=size.bytes)
        return stored


@dataclass(frozen=True)
class OnlineProducer:
    """Workers of one stream, ready to be driven by `drive_producer`."""

    workers: Sequence[ArrivalWorker]
    source: RowSource
    pool: TaskPool
    sink: RefSink


def drive_producer(producer: OnlineProducer, should_stop: ShouldStop = lambda: False) -> ProducerSummary:
    """Run all workers, a thread each, until the source is exhausted or `should_stop`; the stream ends in any case.

    A worker that fails is dropped, and its task goes to another one. If tasks are left when no worker can go on, or when
    they should stop, the consumer is told why.

    Raises:
        DraftworksError: the first error, if no worker could go on. Errors after `should_stop` are logged only.
    """
    failures: list[BaseException] = []
    workers, pool, sink = producer.workers, producer.pool, producer.sink

    def work(worker: ArrivalWorker) -> None:
        try:
            worker.run(should_stop)
        except BaseException as error:
            log.warning("worker %s of a stream has failed: %s", worker.name, _describe(error))
            failures.append(error)

    def publish_committed() -> None:
        for refs in pool.iterate_committed():
            sink.publish(refs)

    with sink:
        if not sink.is_over:
            publish_committed()
            pool.add(producer.source.list_tasks(pool.run_id))
            _run_all(work, workers)
        if not pool.is_drained:
            if failures and not should_stop() and not sink.is_over:
                raise failures[0]
            sink.fail(StoreError("the producers stopped before their source was exhausted, as they were told to"))
        elif not sink.is_over:
            publish_committed()  # also what other producers have captured, of which one may have died
    return sum((worker.summary for worker in workers), ProducerSummary())


def _run_all(work: Callable[[ArrivalWorker], None], workers: Sequence[ArrivalWorker]) -> None:
    if len(workers) == 1:
        work(workers[0])
        return

    def in_background(worker: ArrivalWorker) -> None:
        block_stop_signals()
        work(worker)

    threads = [threading.Thread(target=in_background, args=[each], name=each.name, daemon=True) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _make_key(name: str, tensor: Tensor) -> str:
    """Return the content key of tokens or of a mask."""
    return digest({"feature": name, "values": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()})


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, DraftworksError) else f"{type(error).__name__}: {error}"
