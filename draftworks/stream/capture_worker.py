"""A producer of features: leases capture tasks, by plan or as they come, runs them through the target, stores what is sound."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from torch import Tensor

from draftworks.capture.capture_plan import SampleJob, StreamPlan
from draftworks.capture.engine import TargetEngine, find_backend
from draftworks.capture.session import Confirmation, InFlight, InFlightBudget, RequestSize
from draftworks.capture.verify import CapturedSample, SoundCapture, verify_head_of
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenRow
from draftworks.errors import CaptureError, DraftworksError
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.stream.controller import DataFlowController
from draftworks.stream.leases import LeaseKeeper
from draftworks.stream.metadata_store import ConsumerProgress, TaskFailure, TaskLease
from draftworks.stream.stream_consumer import StreamClaims
from draftworks.stream.stream_rounds import StreamRound

POLL_S, LONGEST_POLL_S = 0.02, 0.25
"""The first and the longest pause between two looks for a task."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSummary:
    """What producers did: tasks ended, samples captured and stored, their tokens and bytes, seconds of waiting."""

    tasks: int = 0
    captured: int = 0
    tokens: int = 0
    nbytes: int = 0
    waited_s: float = 0.0

    def __add__(self, other: WorkerSummary) -> WorkerSummary:
        names = [field.name for field in fields(self)]
        return WorkerSummary(**{name: getattr(self, name) + getattr(other, name) for name in names})


class TaskOrder(ABC):
    """Which tasks a worker takes, and what they give: a plan's, or a source's in the order in which they come.

    Attributes:
        rows: the samples of jobs, by `SampleJob.row`.
        size: number of samples of which `capture.max_failed_share` is the share.
        calls_engine: whether `list_jobs` calls the engine, which then must not be capturing.
        ahead: how many tasks a worker leases beyond those that it captures.
        counts_keys: whether the control plane looks after the keys, see `MetadataStore`.
    """

    controller: DataFlowController
    rows: Mapping[int, TokenRow] | Sequence[TokenRow]
    size: int
    calls_engine: bool = False
    ahead: int = 0
    counts_keys: bool = False

    @abstractmethod
    def lease(self, worker: str, limit: int) -> Sequence[TaskLease] | None:
        """Return up to `limit` leases, as many as there are now; None if nothing is wanted any more."""

    @abstractmethod
    def list_jobs(self, lease: TaskLease, load_engine: Callable[[], TargetEngine]) -> list[SampleJob]:
        """Return the samples of a task that are needed, in the order of its batch, each with the streams to store."""

    @abstractmethod
    def list_refs(self, lease: TaskLease, failed: frozenset[str]) -> list[SampleRef]:
        """Return the references of a task, once its jobs are stored, without the samples that have no features."""

    def find_next(self) -> TaskOrder | None:
        """Return the order to go over to, if there is one."""
        return None


@dataclass(frozen=True)
class _Begun:
    """A leased task of which the engine was asked for features; `answer` is None where it lacks none."""

    lease: TaskLease
    jobs: Sequence[SampleJob]
    answer: Future[list[dict[str, Tensor]]] | None


class CaptureWorker:
    """Captures the tasks of an order; several are in flight, as many as the budget of `CaptureRun.capture` allows.

    While the engine computes one, the one before is checked and stored. Any number of workers share the tasks by leases.
    A worker may join or die at any time: what it had leased goes to another when the lease is over. A task of which an
    attempt failed is leased alone, since it may be the one that kills its worker.

    Args:
        name: of this worker, for leases and messages.
        run: the capture settings.
        load_engine: called once, when there is something to capture.
        should_stop: asked before another task is begun; those that are begun are finished.
        confirm: check of an engine that another party can change, called before each batch is stored.
    """

    def __init__(
        self,
        name: str,
        run: CaptureRun,
        order: TaskOrder,
        store: KeyedFeatureStore,
        load_engine: Callable[[], TargetEngine],
        should_stop: Callable[[], bool] = lambda: False,
        confirm: Confirmation | None = None,
    ) -> None:
        self.name = name
        self.summary = WorkerSummary()
        self._run = run
        self._order = order
        self._store = store
        self._load_engine = load_engine
        self._should_stop = should_stop
        self._confirm = confirm
        self._streams = StreamPlan.of(run)
        self._sound = SoundCapture(run, self._streams, order.rows, order.size)
        self._whole_batches = find_backend(run.capture.backend).repeatable
        self._engine: TargetEngine | None = None
        self._verified = False
        self._largest = self._measure(run.capture.batch_tokens)
        self._waiting: deque[TaskLease] = deque()
        self._in_flight: InFlight[_Begun] = InFlight(InFlightBudget(0, 0))
        self._keeper = LeaseKeeper(order.controller)
        self._pause_s = POLL_S

    def run(self) -> WorkerSummary:
        """Work until nothing is wanted any more, or `should_stop`.

        Raises:
            CaptureError: more samples failed than `capture.max_failed_share` allows.
            EngineError, StoreError: the engine or the store cannot go on. Leased tasks go back to the pool.
        """
        try:
            with self._keeper.renewing():
                self._work()
        finally:
            if self._engine is not None and self._in_flight:
                self._engine.cancel([each.answer for each in self._in_flight.list_work() if each.answer is not None])
        return self.summary

    def _work(self) -> None:
        try:
            while not self._should_stop():
                self._follow(self._order.find_next())
                found = self._lease()
                if found is None:
                    return
                if self._waiting and self._has_room():
                    self._begin(self._waiting.popleft())
                elif self._in_flight:
                    self._finish()
                elif not found:
                    self._wait()
            self._give_back(self._waiting, "was told to stop", counts=False)
            while self._in_flight:
                self._finish()
        except BaseException as error:
            while isinstance(error, CaptureError) and self._in_flight:  # one sample's fault: others are finished
                with suppress(DraftworksError):
                    self._finish()
            self._give_back(self._keeper.leases, _describe(error), counts=False)
            raise

    def _follow(self, order: TaskOrder | None) -> None:
        """Go over to another order, once what is in flight is stored; the engine stays."""
        if order is not None:
            while self._in_flight:
                self._finish()
            self._give_back(self._waiting, "went over to another round", counts=False)
            self._waiting.clear()
            self._order = order
            self._keeper.follow(order.controller)

    def _lease(self) -> Sequence[TaskLease] | None:
        if (
            self._waiting
            or not self._in_flight.fits(self._largest)
            or any(each.failures for each in self._keeper.leases)
        ):
            return ()
        leases = self._order.lease(self.name, 1 + self._order.ahead)
        for lease in leases or ():
            self._keeper.add(lease)
            self._waiting.append(lease)
        if leases:
            self._pause_s = POLL_S
        return leases

    def _has_room(self) -> bool:
        return self._in_flight.fits(self._largest) and not (self._order.calls_engine and self._in_flight)

    def _wait(self) -> None:
        time.sleep(self._pause_s)
        self.summary += WorkerSummary(waited_s=self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_POLL_S)

    def _begin(self, lease: TaskLease) -> None:
        """Ask the engine for what the store lacks of a task's features."""
        try:
            begun = self._ask(lease)
        except BaseException as error:
            self._give_back([lease], _describe(error))
            raise
        self._in_flight.add(begun, self._measure(sum(job.num_tokens for job in begun.jobs)))
        if (
            begun.answer is not None and not self._verified
        ):  # alone: nothing more is asked of an engine until its head was verified
            self._finish()

    def _ask(self, lease: TaskLease) -> _Begun:
        self._store.refresh()
        jobs = self._order.list_jobs(lease, self._open_engine)
        if not any(job.missing for job in jobs):
            return _Begun(lease, (), None)
        # The composition of a batch decides the last bits of its features: repeatable engines get all of it again.
        jobs = jobs if self._whole_batches else [job for job in jobs if job.missing]
        return _Begun(lease, jobs, self._sound.submit(self._open_engine(), jobs))

    def _open_engine(self) -> TargetEngine:
        if self._engine is None:
            self._engine = self._load_engine()
            self._in_flight.limit(InFlightBudget.of(self._run.capture, self._engine))
        return self._engine

    def _measure(self, tokens: int) -> RequestSize:
        return RequestSize.of(tokens, self._streams, self._run.capture)

    def _finish(self) -> None:
        """Store and commit the oldest task in flight, and those after it that are captured already."""
        done: list[_Begun] = []
        while self._in_flight and (not done or _is_captured(self._in_flight.oldest)):
            oldest = self._in_flight.oldest
            try:
                self._store_answer(oldest)
            except BaseException as error:
                self._commit(done)
                self._give_back([oldest.lease], _describe(error))
                raise
            finally:
                self._in_flight.drop_oldest()
            done.append(oldest)
        self._commit(done)

    def _store_answer(self, begun: _Begun) -> None:
        """Check and store the features of a task."""
        if begun.answer is None:
            return
        engine = self._open_engine()
        captured = self._sound.collect(engine, begun.jobs, begun.answer)
        if captured and not self._verified:
            verify_head_of(engine, captured)
            self._verified = True
        if captured and self._confirm is not None:
            self._confirm(engine)
        for each in captured:
            self._put(each)

    def _put(self, captured: CapturedSample) -> None:
        tensors = captured.encode_missing(self._streams)
        self._store.put(captured.job.make_ref(self._store.uri), tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.summary += WorkerSummary(captured=1, tokens=captured.job.num_tokens, nbytes=nbytes)

    def _commit(self, done: Sequence[_Begun]) -> None:
        """Commit what tasks have given. One of which a sample failed goes back to the pool, a stale one is begun again."""
        if not done:
            return
        leases = [each.lease for each in done]
        reasons = {each.sample_id: each.reason for each in self._sound.failed}
        refs: list[SampleRef] = []
        failures: list[TaskFailure] = []
        for begun in done:
            lease = begun.lease
            own = self._order.list_refs(lease, frozenset(reasons))
            refs += [replace(ref, source_task_id=lease.task.task_id) for ref in own]
            ids = {*lease.task.sample_ids, *(job.sample_id for job in begun.jobs)}
            said = [reason for sample_id, reason in reasons.items() if sample_id in ids]
            failures += [TaskFailure(lease, "; ".join(said))] if said else []
        self._store.flush()
        failed = {failure.lease.task.task_id for failure in failures}
        whole = [lease for lease in leases if lease.task.task_id not in failed]
        frees = min(lease.frees for lease in leases) if self._order.counts_keys else None
        result = self._order.controller.commit_samples(refs, whole, frees)
        stale = {ref.source_task_id for ref in refs if ref.sample_id in set(result.stale)}
        for lease in leases:
            if lease.task.task_id in stale - failed:
                self._waiting.append(replace(lease, frees=result.frees))
            else:
                self._keeper.drop(lease)
        self.summary += WorkerSummary(tasks=len({lease.task.task_id for lease in whole} - stale))
        if failures:
            self._order.controller.fail_tasks(failures)
        if stale:
            self._wait()

    def _give_back(self, leases: Sequence[TaskLease] | deque[TaskLease], reason: str, counts: bool = True) -> None:
        """Return leased tasks to the pool; only what is their own fault counts as an attempt."""
        failures = [TaskFailure(lease, f"worker {self.name}: {reason}", counts) for lease in leases]
        for failure in failures:
            self._keeper.drop(failure.lease)
        if failures:
            self._order.controller.fail_tasks(failures)


def _is_captured(begun: _Begun) -> bool:
    return begun.answer is None or begun.answer.done()


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, DraftworksError) else f"{type(error).__name__}: {error}"


LOOK_S = 1.0
"""Between two looks for another round."""


class PlannedOrder(TaskOrder):
    """The tasks of a plan, until every training that follows the stream has done its last step or has left.

    Args:
        tokens: the tokenized set that the plan's references are of.
        batch_tokens: tokens of a task at most.
        find_next_round: asked about once a second; returns the round to go over to, if there is one.
    """

    def __init__(
        self,
        current: StreamRound,
        store: KeyedFeatureStore,
        tokens: Sequence[TokenRow],
        batch_tokens: int,
        find_next_round: Callable[[], StreamRound | None] = lambda: None,
    ) -> None:
        self.controller = current.controller
        self.rows = tokens
        self.size = len(tokens)
        self._plan = current.plan
        self._claims = StreamClaims(current.plan, current.controller.consumer)
        self._store = store
        self._tokens = tokens
        self._batch_tokens = batch_tokens
        self._find_next_round = find_next_round
        self._looked = time.monotonic()
        self._rows = {row.sample_id: index for index, row in enumerate(tokens)}
        self._progress: dict[str, ConsumerProgress] = {}
        self._window_end = 0
        self._groups_added = 0
        self._done_step = 0

    def find_next(self) -> TaskOrder | None:
        if time.monotonic() - self._looked < LOOK_S:
            return None
        self._looked = time.monotonic()
        found = self._find_next_round()
        if found is None:
            return None
        log.info("planned again without %d samples", len(found.left_out))
        return PlannedOrder(found, self._store, self._tokens, self._batch_tokens, self._find_next_round)

    def lease(self, worker: str, limit: int) -> Sequence[TaskLease] | None:
        """Add the tasks of all groups inside the window, and lease the next one."""
        self._progress = self.controller.read_consumers()
        done_step = self._claims.find_done_step(self._progress)
        if done_step is None:
            return None
        end = self._window_end = self._plan.find_window_end(done_step)
        if done_step < self._done_step:  # a trainer went back: what was over is needed again
            self._groups_added = 0
        self._done_step = done_step
        due = [group for group in self._plan.groups[self._groups_added :] if group.last <= end]
        for group in due:
            self.controller.add_tasks(
                self._plan.make_tasks(group, self.controller.run_id, self._batch_tokens, done_step)
            )
        self._groups_added += len(due)
        return self.controller.lease_tasks(worker, limit, max_step=end)

    def list_jobs(self, lease: TaskLease, load_engine: Callable[[], TargetEngine]) -> list[SampleJob]:
        """Return the jobs of a task with the streams that the store lacks and a training still needs."""
        jobs = self._plan.list_jobs(lease.task)
        missing = set(self._store.find_missing(key for job in jobs for key in job.keys.values()))
        lacking = [replace(job, missing=tuple(n for n, key in job.keys.items() if key in missing)) for job in jobs]
        needed = self._claims.drop_unneeded(lacking, self._progress, self._window_end)
        # Rows of a plan that lacks samples are others than those of the tokenized set.
        return [
            replace(job, row=self._rows[job.sample_id], missing=streams)
            for job, streams in zip(lacking, needed, strict=True)
        ]

    def list_refs(self, lease: TaskLease, failed: frozenset[str]) -> list[SampleRef]:
        """Return a task's references; of one with failed samples, those whose features are in the store."""
        refs = self._plan.get_refs(lease.task.sample_ids)
        if failed.isdisjoint(lease.task.sample_ids):
            return list(refs)
        missing = set(self._store.find_missing(key for ref in refs for key in ref.feature_keys.values()))
        return [ref for ref in refs if missing.isdisjoint(ref.feature_keys.values())]
