"""A producer of features: leases capture tasks, runs them through the target, stores and commits what is sound."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from draftworks.capture.engine import TargetEngine, find_backend
from draftworks.capture.plan import SampleJob, StreamPlan
from draftworks.capture.session import Confirmation, InFlight, InFlightBudget, RequestSize
from draftworks.capture.verify import SoundCapture, verify_head_of
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenRow
from draftworks.dataflow.controller import DataFlowController
from draftworks.dataflow.metadata_store import ConsumerProgress
from draftworks.dataflow.tasks import TaskFailure, TaskLease
from draftworks.errors import CaptureError, DraftworksError
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.runtime.lease_keeper import LeaseKeeper
from draftworks.runtime.stream_claims import StreamClaims
from draftworks.runtime.stream_rounds import StreamRound
from draftworks.runtime.streaming_plan import StreamingPlan

POLL_S = 0.05
LOOK_S = 1.0
"""Between two looks for another round."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSummary:
    """What one producer did: tasks ended, contents captured and stored, their tokens and bytes, seconds of waiting."""

    tasks: int = 0
    captured: int = 0
    tokens: int = 0
    nbytes: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True)
class _Begun:
    """A leased task of which the engine was asked for features."""

    lease: TaskLease
    engine: TargetEngine
    jobs: Sequence[SampleJob]
    answer: Future[list[dict[str, Tensor]]]


class RolloutWorker:
    """Captures the tasks of a streaming plan, in the order of steps, never further ahead than the plan's window.

    It leases several tasks, as many as the budget of what is in flight allows: while the engine computes one, the one
    before is checked and stored. Any number of workers share the tasks by leases. A worker may join or die at any time:
    what it had leased goes to another when the lease is over.

    Args:
        name: of this worker, for leases and messages.
        run: the capture settings; `tokens` is the tokenized set that the plan's references are of.
        load_engine: called once, when there is something to capture.
        should_stop: asked before another task is leased; those that are leased are finished.
        confirm: check of an engine that another party can change, called before each batch is stored.
        find_next_round: asked about once a second; returns the round to go over to, if there is one.
    """

    def __init__(
        self,
        name: str,
        run: CaptureRun,
        plan: StreamingPlan,
        controller: DataFlowController,
        store: KeyedFeatureStore,
        tokens: Sequence[TokenRow],
        load_engine: Callable[[], TargetEngine],
        should_stop: Callable[[], bool] = lambda: False,
        confirm: Confirmation | None = None,
        find_next_round: Callable[[], StreamRound | None] = lambda: None,
    ) -> None:
        self._confirm = confirm
        self._find_next_round = find_next_round
        self._looked = time.monotonic()
        self._name = name
        self._run = run
        self._plan = plan
        self._controller = controller
        self._store = store
        self._load_engine = load_engine
        self._should_stop = should_stop
        self._streams = StreamPlan.of(run)
        self._sound = SoundCapture(run, self._streams, tokens, len(tokens))
        self._rows = {row.sample_id: index for index, row in enumerate(tokens)}
        self._whole_batches = find_backend(run.capture.backend).repeatable
        self._engine: TargetEngine | None = None
        self._claims = StreamClaims(plan, controller.consumer)
        self._progress: dict[str, ConsumerProgress] = {}
        self._window_end = 0
        self._largest = self._measure(run.capture.batch_tokens)
        self._in_flight: InFlight[_Begun] = InFlight(InFlightBudget(0, 0))
        self._keeper = LeaseKeeper(controller)
        self._groups_added = 0
        self._done_step = 0
        self._summary = WorkerSummary()

    def run(self) -> WorkerSummary:
        """Work until every training that follows the stream has done its last step or has left, or `should_stop`.

        Raises:
            CaptureError: more samples failed than `capture.max_failed_share` allows.
            EngineError: the engine cannot go on. Leased tasks go back to the pool.
        """
        try:
            with self._keeper.renewing():
                self._work()
        finally:
            if self._engine is not None and self._in_flight:
                self._engine.cancel([each.answer for each in self._in_flight.list_work()])
        return self._summary

    def _work(self) -> None:
        try:
            while not self._should_stop():
                self._follow_rounds()
                self._progress = self._controller.read_consumers()
                done = self._claims.find_done_step(self._progress)
                if done is None:
                    return
                leases = self._lease(done) if self._in_flight.fits(self._largest) else ()
                for lease in leases:
                    self._begin(lease)
                if not leases and self._in_flight:
                    self._finish_oldest()
                elif not leases:
                    time.sleep(POLL_S)
                    self._add(waited_s=POLL_S)
            while self._in_flight:
                self._finish_oldest()
        except BaseException as error:
            while isinstance(error, CaptureError) and self._in_flight:  # one sample's fault: others are finished
                with suppress(DraftworksError):
                    self._finish_oldest()
            self._give_back(self._keeper.leases, error)
            raise

    def _follow_rounds(self) -> None:
        """Go over to the newest round, once what is in flight is stored; the engine stays."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        found = self._find_next_round()
        if found is None:
            return
        while self._in_flight:
            self._finish_oldest()
        log.info("%s: planned again without %d samples", self._name, len(found.left_out))
        self._plan, self._controller, self._groups_added, self._done_step = found.plan, found.controller, 0, 0
        self._claims = StreamClaims(found.plan, found.controller.consumer)
        self._keeper.follow(found.controller)

    def _lease(self, done_step: int) -> Sequence[TaskLease]:
        """Add the tasks of all groups inside the window, and lease the next one."""
        end = self._window_end = self._plan.find_window_end(done_step)
        if done_step < self._done_step:  # a trainer went back: what was over is needed again
            self._groups_added = 0
        self._done_step = done_step
        due = [group for group in self._plan.groups[self._groups_added :] if group.last <= end]
        for group in due:
            self._controller.add_tasks(
                self._plan.make_tasks(group, self._controller.run_id, self._run.capture.batch_tokens, done_step)
            )
        self._groups_added += len(due)
        return self._controller.lease_tasks(self._name, limit=1, max_step=end)

    def _begin(self, lease: TaskLease) -> None:
        """Ask the engine for what the store lacks of a task's features; a task that lacks nothing is done."""
        self._keeper.add(lease)
        self._store.refresh()
        jobs = self._select_missing(self._plan.list_jobs(lease.task))
        if not any(job.missing for job in jobs):
            self._end(lease)
            return
        first = self._engine is None
        if self._engine is None:
            self._engine = self._load_engine()
            self._in_flight = InFlight(InFlightBudget.of(self._run.capture, self._engine))
        size = self._measure(sum(job.num_tokens for job in jobs))
        answer = self._sound.submit(self._engine, jobs)
        self._in_flight.add(_Begun(lease, self._engine, jobs, answer), size)
        if first:  # alone: nothing more is asked of an engine until its head was verified
            self._finish_oldest(verify_head=True)

    def _measure(self, tokens: int) -> RequestSize:
        return RequestSize.of(tokens, self._streams, self._run.capture)

    def _finish_oldest(self, verify_head: bool = False) -> None:
        oldest = self._in_flight.oldest
        try:
            self._store_answer(oldest, verify_head)
            self._end(oldest.lease)
        except BaseException as error:
            self._give_back([oldest.lease], error)
            raise
        finally:
            self._in_flight.drop_oldest()

    def _store_answer(self, begun: _Begun, verify_head: bool) -> None:
        """Check and store the features of a task."""
        captured = self._sound.collect(begun.engine, begun.jobs, begun.answer)
        if verify_head:
            verify_head_of(begun.engine, captured)
        if self._confirm is not None:
            self._confirm(begun.engine)
        for each in captured:
            tensors = each.encode_missing(self._streams)
            self._store.put(each.job.make_ref(self._store.uri), tensors)
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            self._add(captured=1, tokens=each.job.num_tokens, nbytes=nbytes)
        self._store.flush()

    def _end(self, lease: TaskLease) -> None:
        """Commit what a task's features are in the store for; a task of which a sample failed goes back to the pool."""
        failed = [each for each in self._sound.failed if each.sample_id in lease.task.sample_ids]
        self._commit(lease, complete=not failed)
        self._keeper.drop(lease)
        if failed:
            self._controller.fail_task(lease, "; ".join(each.reason for each in failed))
        else:
            self._add(tasks=1)

    def _give_back(self, leases: Sequence[TaskLease], error: BaseException) -> None:
        reason = str(error) if isinstance(error, DraftworksError) else f"{type(error).__name__}: {error}"
        failures = [TaskFailure(lease, f"worker {self._name}: {reason}") for lease in leases]
        for lease in leases:
            self._keeper.drop(lease)
        if failures:
            self._controller.fail_tasks(failures)

    def _commit(self, lease: TaskLease, complete: bool) -> None:
        """Commit the samples of a task; of a task that is not `complete`, those whose features are in the store."""
        refs = [replace(ref, source_task_id=lease.task.task_id) for ref in self._plan.get_refs(lease.task.sample_ids)]
        if not complete:
            missing = set(self._store.find_missing(key for ref in refs for key in ref.feature_keys.values()))
            refs = [ref for ref in refs if missing.isdisjoint(ref.feature_keys.values())]
        self._controller.commit_samples(refs, [lease] if complete else [])

    def _select_missing(self, jobs: Sequence[SampleJob]) -> list[SampleJob]:
        """Return the jobs with the streams that the store lacks and a training still needs.

        A backend whose batches are repeatable gets the whole batch again if anything of it is missing, because the
        composition of a batch decides the last bits of its features.
        """
        missing = set(self._store.find_missing(key for job in jobs for key in job.keys.values()))
        lacking = [replace(job, missing=tuple(n for n, key in job.keys.items() if key in missing)) for job in jobs]
        needed = self._claims.drop_unneeded(lacking, self._progress, self._window_end)
        # Rows of a plan that lacks samples are others than those of the tokenized set.
        trimmed = [
            replace(job, row=self._rows[job.sample_id], missing=streams)
            for job, streams in zip(lacking, needed, strict=True)
        ]
        return trimmed if self._whole_batches else [job for job in trimmed if job.missing]

    def _add(self, **more: float) -> None:
        now = {name: getattr(self._summary, name) + value for name, value in more.items()}
        self._summary = replace(self._summary, **now)  # type: ignore[arg-type]
