"""The control plane of one run, as one of its processes uses it: tasks, references, acknowledgements; and where it is."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError
from draftworks.features.contracts import SampleRef
from draftworks.stream.metadata_store import (
    AckedStep,
    AckResult,
    CommitResult,
    ConsumerProgress,
    DeadLetter,
    MetadataStore,
    PromptTask,
    RefPage,
    TaskCounts,
    TaskFailure,
    TaskLease,
    Watermark,
    require_id,
)
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore

PAGE = 1024
"""References read at a time."""


class DataFlowController:
    """Tasks, references and acknowledgements of one run. Thread-safe; every call is one transaction over a batch.

    Args:
        store: where the state is; several processes may share one.
        clock: seconds of `time.time()`.
        consumer: the identity under which this process acknowledges; acknowledgements of consumers are apart.
        max_attempts: attempts after which a task is a dead letter; holds for the tasks that this controller adds.
        lease_s: duration of task leases.
        consumer_lease_s: duration of the hold on the consumer's identity, unless it is renewed.
    """

    def __init__(
        self,
        run_id: str,
        store: MetadataStore,
        clock: Callable[[], float] = time.time,
        consumer: str = "trainer",
        max_attempts: int = 3,
        lease_s: float = 120.0,
        consumer_lease_s: float = 30.0,
    ) -> None:
        self.run_id = require_id(run_id, "run id")
        self.store = store
        self.consumer = require_id(consumer, "consumer")
        self.lease_s = lease_s
        self.consumer_lease_s = consumer_lease_s
        self._clock = clock
        self._max_attempts = max_attempts

    def of_run(self, run_id: str) -> DataFlowController:
        """Return the controller of another run in the same store, with the same settings."""
        return DataFlowController(
            run_id, self.store, self._clock, self.consumer, self._max_attempts, self.lease_s, self.consumer_lease_s
        )

    @cached_property
    def owner(self) -> str:
        """The name of this process as the holder of a consumer's identity; no other has it."""
        return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    def add_tasks(self, tasks: Sequence[PromptTask]) -> int:
        """Add tasks; return how many are new. A task whose id is known is left as it is."""
        return self.store.add_tasks(self.run_id, tasks, self._max_attempts)

    def lease_tasks(
        self, worker: str, limit: int = 1, max_step: int | None = None, watermark: Watermark | None = None
    ) -> tuple[TaskLease, ...]:
        """Lease up to `limit` pending tasks by step for `lease_s` seconds, none of steps after `max_step`.

        Args:
            watermark: of what is leased, or committed and not acknowledged by this controller's consumer.
        """
        return self.store.lease_tasks(
            *(self.run_id, worker, limit, self.lease_s, self._clock()),
            *(uuid.uuid4().hex, max_step, watermark, self.consumer),
        )

    def renew_leases(self, leases: Sequence[TaskLease]) -> tuple[TaskLease, ...]:
        """Return the leases that still held, extended by `lease_s` from now; the others are lost."""
        return self.store.renew_leases(self.run_id, leases, self.lease_s, self._clock())

    def fail_task(self, lease: TaskLease, reason: str) -> bool:
        """Return a task to the pool; return True if that was its last attempt, so that it is a dead letter."""
        return bool(self.fail_tasks([TaskFailure(lease, reason)]))

    def fail_tasks(self, failures: Sequence[TaskFailure]) -> tuple[str, ...]:
        """Return tasks to the pool; return the ids of those that are dead letters now."""
        return self.store.fail_tasks(self.run_id, failures, self._clock())

    def commit_samples(
        self, refs: Sequence[SampleRef], done: Sequence[TaskLease] = (), frees: int | None = None
    ) -> CommitResult:
        """Commit references, each sample once, and mark the tasks of `done` as done, in one transaction.

        A lease may have expired: what was captured is content, whoever captured it. References of dead tasks are
        refused.

        Args:
            frees: see `MetadataStore.commit_samples`.
        """
        return self.store.commit_samples(self.run_id, refs, done, self._clock(), frees)

    def find_uncommitted(self, sample_ids: Sequence[str]) -> tuple[str, ...]:
        """Return the samples without a committed reference, in the order given."""
        return self.store.find_uncommitted(self.run_id, sample_ids)

    def read_refs(self, cursor: int = 0, limit: int = PAGE, acked: bool | None = None, uses: int = 1) -> RefPage:
        """Return up to `limit` references committed after `cursor`, in commit order.

        Args:
            acked: True for samples that this consumer acknowledged in at least `uses` epochs, False for the others.
        """
        return self.store.read_refs(self.run_id, cursor, limit, self.consumer, acked, uses)

    def iterate_refs(self, acked: bool | None = None, uses: int = 1) -> Iterator[SampleRef]:
        """Yield the references committed so far, page by page, chosen as in `read_refs`."""
        page = self.read_refs(0, PAGE, acked, uses)
        while page.refs:
            yield from page.refs
            page = self.read_refs(page.cursor, PAGE, acked, uses)

    def ack(self, sample_ids: Sequence[str], global_step: int, epoch: int = 0) -> int:
        """Record in one transaction that the optimizer step used the samples; return how many are new.

        Raises:
            StoreError: nothing is recorded, since a sample is not committed or was acknowledged at another step of the
                epoch, or another process holds this consumer's identity.
        """
        return self.ack_step(sample_ids, global_step, epoch).new

    def ack_step(
        self,
        sample_ids: Sequence[str],
        global_step: int,
        epoch: int = 0,
        release: bool = False,
        freed: Sequence[str] = (),
    ) -> AckResult:
        """As `ack`, for a consumer that frees what its references needed, see `MetadataStore.ack_samples`."""
        now = self._clock()
        return self.store.ack_samples(
            self.run_id, self.consumer, self.owner, sample_ids, global_step, epoch, now, release, freed
        )

    def read_order(self) -> Iterator[AckedStep]:
        """Yield the acknowledged steps with their samples: what the training took, in order."""
        after = 0
        while page := self.store.read_order(self.run_id, self.consumer, after, PAGE):
            yield from page
            after = page[-1].step

    def record_checkpoint(self, global_step: int, release: bool = False) -> None:
        """Record that a complete checkpoint covers all steps up to `global_step`; with `release`, so are their keys."""
        self.store.record_checkpoint(self.run_id, self.consumer, global_step, release)

    def free_keys(self, freed: Sequence[str] = (), everything: bool = False) -> tuple[str, ...]:
        """Record that keys are removed from the store; return those that are to be, see `MetadataStore.free_keys`."""
        return self.store.free_keys(self.run_id, freed, everything)

    def record_fact(self, name: str, text: str) -> None:
        """Record something that all processes of the run have to know."""
        self.store.record_fact(self.run_id, name, text)

    def read_facts(self) -> dict[str, str]:
        """Return what was recorded, by name."""
        return self.store.read_facts(self.run_id)

    def read_progress(self) -> ConsumerProgress:
        """Return this consumer's last acknowledged step and its last checkpoint."""
        return self.store.read_progress(self.run_id, self.consumer)

    def read_consumers(self) -> dict[str, ConsumerProgress]:
        """Return the progress of every consumer of the run that has done something, by name."""
        return self.store.read_consumers(self.run_id)

    def record_left(self, reason: str, consumer: str | None = None) -> None:
        """Record why a consumer, by default this one, needs nothing any more; an empty reason: it takes part again."""
        self.store.record_left(self.run_id, consumer or self.consumer, reason)

    def rewind(self, global_step: int) -> int:
        """Undo this consumer's acknowledgements after the checkpoint of `global_step`; return how many."""
        return self.store.rewind(self.run_id, self.consumer, self.owner, global_step, self._clock())

    def requeue_lost(self, sample_ids: Sequence[str]) -> tuple[str, ...]:
        """Withdraw references whose features are gone and reopen their tasks; return those without a task."""
        return self.store.requeue_lost(self.run_id, sample_ids)

    def count_tasks(self) -> TaskCounts:
        """Return the number of tasks in each state."""
        return self.store.count_tasks(self.run_id, self._clock())

    def read_dead_letters(self) -> tuple[DeadLetter, ...]:
        """Return the tasks that failed for good, with every reason."""
        return self.store.read_dead_letters(self.run_id)

    def hold_consumer(self) -> None:
        """Take or keep this consumer's identity for `consumer_lease_s`. Raises StoreError if another process has it."""
        self.store.hold_consumer(self.run_id, self.consumer, self.owner, self.consumer_lease_s, self._clock())

    def release_consumer(self) -> None:
        """Give the identity back, so that the next process need not wait for its end."""
        self.store.release_consumer(self.run_id, self.consumer, self.owner)

    def close(self) -> None:
        """Close the store."""
        self.store.close()


LOCAL_COLOCATED = "local_colocated"
DATAFLOW_COLOCATED = "dataflow_colocated"
DISAGGREGATED = "disaggregated"
DEPLOYMENT_MODES = (LOCAL_COLOCATED, DATAFLOW_COLOCATED, DISAGGREGATED)


@dataclass(frozen=True)
class ControlPlane:
    """A run's controller, and whether optimizer steps are acknowledged durably."""

    controller: DataFlowController
    durable_ack: bool


def resolve_control_plane(
    mode: str,
    run_id: str,
    metadata_db_path: Path | None = None,
    store: MetadataStore | None = None,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> ControlPlane:
    """Return the control plane of a deployment mode.

    `local_colocated` keeps tasks and references in the memory of this process; `dataflow_colocated` and `disaggregated`
    keep them, and acknowledgements, durably.

    Args:
        metadata_db_path: the database, on a disk of this host.
        store: instead of `metadata_db_path`: an open store, such as the client of a control server.
        options: of `DataFlowController`.

    Raises:
        ConfigError: an unknown mode, or not exactly one place for a mode that keeps state, or one for the mode that
            keeps none.
        StoreError: the database cannot be used.
    """
    if mode not in DEPLOYMENT_MODES:
        raise ConfigError(f"deployment_mode: expected one of {', '.join(DEPLOYMENT_MODES)}, found {mode!r}")
    given = (metadata_db_path is not None) + (store is not None)
    if given != (mode != LOCAL_COLOCATED):
        expected = "neither, as it keeps no state" if mode == LOCAL_COLOCATED else "one of the two"
        raise ConfigError(f"deployment_mode {mode}: metadata_db_path or a metadata store: expected {expected}")
    if metadata_db_path is not None:
        store = SQLiteMetadataStore(metadata_db_path)
    controller = DataFlowController(run_id, store or InMemoryMetadataStore(), clock, **options)
    return ControlPlane(controller, mode != LOCAL_COLOCATED)
