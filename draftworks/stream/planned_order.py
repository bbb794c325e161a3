"""The tasks of a streaming plan, in the order of its steps, within the window that the watermark allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from draftworks.capture.engine import TargetEngine
from draftworks.capture.plan import SampleJob
from draftworks.data.tokenized import TokenRow
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.stream.capture_worker import TaskOrder
from draftworks.stream.metadata_store import ConsumerProgress
from draftworks.stream.stream_claims import StreamClaims
from draftworks.stream.stream_rounds import StreamRound
from draftworks.stream.tasks import TaskLease

LOOK_S = 1.0
"""Between two looks for another round."""
log = logging.getLogger(__name__)


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
