"""The interface of stores for control-plane state.

Every method is one transaction over all of its arguments, and can be repeated with the same arguments without harm: a
client that lost the answer calls again. Times are seconds of `time.time()`; `now` is the caller's clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from draftworks.features.contracts import SampleRef, assert_no_tensors
from draftworks.stream.tasks import DeadLetter, PromptTask, TaskCounts, TaskFailure, TaskLease, require_id
from draftworks.stream.watermark import Watermark


@dataclass(frozen=True)
class CommitResult:
    """What became of the references of a commit, by sample id.

    Attributes:
        duplicates: committed before; the reference of then is kept.
        refused: their task is a dead letter, so the plan has gone on without them.
        stale: not committed, since a key of theirs was freed after it was looked for: look, and capture, again.
        frees: how many keys of the run had been freed by now, see `TaskLease.frees`.
    """

    committed: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    frees: int = 0


@dataclass(frozen=True)
class AckResult:
    """How many samples a step acknowledged that were not before, and the keys to be freed, see `MetadataStore`."""

    new: int
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class AckedStep:
    """The samples of an optimizer step, in the order in which they were acknowledged."""

    step: int
    sample_ids: tuple[str, ...]


@dataclass(frozen=True)
class RefPage:
    """References in commit order, and the cursor that continues after them."""

    refs: tuple[SampleRef, ...]
    cursor: int


@dataclass(frozen=True)
class ConsumerProgress:
    """How far a consumer is: the last optimizer step that it acknowledged, and the last durable checkpoint.

    Attributes:
        left: why the consumer needs nothing any more, such as that it has finished; empty while it takes part.
    """

    acked_step: int = 0
    checkpoint_step: int = 0
    left: str = ""

    @property
    def done_step(self) -> int:
        """The last step that need not be trained any more; a resumed training may have acknowledged none itself."""
        return max(self.acked_step, self.checkpoint_step)


class MetadataStore(ABC):
    """Tasks, references and acknowledgements of runs. Implementations differ in medium, not in meaning.

    In a run in arrival order the control plane also knows which *keys* of a content-keyed store are in use: those of
    references that no consumer has released. Commits that name the keys they found (`frees`) count them, and a key is
    *unused* from the transaction on that releases the last reference to it. The consumer alone removes unused keys from
    the store, and confirms that (`freed`). Until then, and for whoever looked for the key before, a commit that names it
    is stale. So a reference that is committed has its features, however commits, releases and kills fall together.
    """

    durable: bool = True
    """Whether what was committed survives the process."""

    @abstractmethod
    def add_tasks(self, run_id: str, tasks: Sequence[PromptTask], max_attempts: int) -> int:
        """Add tasks; return how many are new. A task whose id is known is left as it is."""

    @abstractmethod
    def lease_tasks(
        self,
        run_id: str,
        worker: str,
        limit: int,
        duration_s: float,
        now: float,
        request_id: str,
        max_step: int | None,
        watermark: Watermark | None,
        consumer: str,
    ) -> tuple[TaskLease, ...]:
        """Lease up to `limit` pending tasks, by step and order of arrival.

        Args:
            request_id: a worker that repeats a request gets the same leases again.
            max_step: leave tasks of later steps alone.
            watermark: lease what fits below it beside all that is leased, or committed and not acknowledged by
                `consumer`. It counts samples and bytes, those of a task by its `size`.
        """

    @abstractmethod
    def renew_leases(
        self, run_id: str, leases: Sequence[TaskLease], duration_s: float, now: float
    ) -> tuple[TaskLease, ...]:
        """Return the leases that still held, extended to `now + duration_s`; the others are lost."""

    @abstractmethod
    def fail_tasks(self, run_id: str, failures: Sequence[TaskFailure], now: float) -> tuple[str, ...]:
        """Return tasks to the pool, or to the dead letters after the last attempt; return the ids of the dead.

        A failure under a lease that is over changes nothing: that attempt was counted when the lease expired.
        """

    @abstractmethod
    def commit_samples(
        self, run_id: str, refs: Sequence[SampleRef], done: Sequence[TaskLease], now: float, frees: int | None
    ) -> CommitResult:
        """Commit references not committed yet, and mark the tasks of `done` as done.

        A lease may have expired: what was captured is content, whoever captured it, and ends the task for all workers.
        A task of which a sample is stale is not done.

        Args:
            frees: of the lease or the result before the keys were looked for; None where the control plane does not
                look after the keys.

        Raises:
            StoreError: a task of `done` is unknown. A reference may name a source that is no task.
        """

    @abstractmethod
    def find_uncommitted(self, run_id: str, sample_ids: Sequence[str]) -> tuple[str, ...]:
        """Return the samples that have no committed reference, in the order given."""

    @abstractmethod
    def read_refs(self, run_id: str, cursor: int, limit: int, consumer: str, acked: bool | None, uses: int) -> RefPage:
        """Return up to `limit` references committed after `cursor` (0 is the beginning), in commit order.

        Args:
            acked: True for samples that `consumer` acknowledged in at least `uses` epochs, False for the others, None
                for all.
        """

    @abstractmethod
    def ack_samples(
        self,
        run_id: str,
        consumer: str,
        owner: str,
        sample_ids: Sequence[str],
        global_step: int,
        epoch: int,
        now: float,
        release: bool,
        freed: Sequence[str],
    ) -> AckResult:
        """Record that the optimizer step `global_step` used the samples.

        Args:
            release: their references need their keys no longer.
            freed: keys that are removed from the store, of those that this method or `free_keys` returned.

        Raises:
            StoreError: a sample is not committed, or was acknowledged in this epoch at another step, or another process
                holds the consumer's identity. Nothing is recorded.
        """

    @abstractmethod
    def read_order(self, run_id: str, consumer: str, after: int, limit: int) -> tuple[AckedStep, ...]:
        """Return up to `limit` acknowledged steps after step `after`, of all epochs."""

    @abstractmethod
    def record_checkpoint(self, run_id: str, consumer: str, global_step: int, release: bool) -> None:
        """Record that a complete checkpoint of the consumer covers all steps up to `global_step`.

        Args:
            release: the references that these steps acknowledged need their keys no longer.
        """

    @abstractmethod
    def free_keys(self, run_id: str, freed: Sequence[str], everything: bool) -> tuple[str, ...]:
        """Record that keys are removed from the store; return those that are to be.

        Args:
            everything: no reference of the run needs its keys any more.
        """

    @abstractmethod
    def record_fact(self, run_id: str, name: str, text: str) -> None:
        """Record something that all processes of a run have to know; it replaces what was recorded under the name."""

    @abstractmethod
    def read_facts(self, run_id: str) -> dict[str, str]:
        """Return what was recorded, by name."""

    @abstractmethod
    def read_progress(self, run_id: str, consumer: str) -> ConsumerProgress:
        """Return the consumer's last acknowledged step and its last checkpoint."""

    @abstractmethod
    def read_consumers(self, run_id: str) -> dict[str, ConsumerProgress]:
        """Return the progress of every consumer that has done something, by name."""

    @abstractmethod
    def record_left(self, run_id: str, consumer: str, reason: str) -> None:
        """Record why a consumer needs nothing any more; an empty reason: it takes part again. Any process may."""

    @abstractmethod
    def rewind(self, run_id: str, consumer: str, owner: str, global_step: int, now: float) -> int:
        """Undo what the consumer did after the checkpoint of `global_step`; return how many acknowledgements."""

    @abstractmethod
    def requeue_lost(self, run_id: str, sample_ids: Sequence[str]) -> tuple[str, ...]:
        """Withdraw committed references whose features are gone, and return their tasks to the pool.

        Acknowledgements stay. Returns the samples that no task can make again; those stay committed.
        """

    @abstractmethod
    def count_tasks(self, run_id: str, now: float) -> TaskCounts:
        """Return the number of tasks in each state, after leases that are over at `now` were returned."""

    @abstractmethod
    def read_dead_letters(self, run_id: str) -> tuple[DeadLetter, ...]:
        """Return the tasks that failed for good, in the order in which they were added."""

    @abstractmethod
    def hold_consumer(self, run_id: str, consumer: str, owner: str, duration_s: float, now: float) -> None:
        """Take or keep a consumer's identity for `duration_s`; called again as the heartbeat.

        Raises:
            StoreError: another owner holds it.
        """

    @abstractmethod
    def release_consumer(self, run_id: str, consumer: str, owner: str) -> None:
        """Give the identity back; nothing happens if another owner has it."""

    @abstractmethod
    def close(self) -> None:
        """Free what the store holds open. State that is durable stays."""


def require_tasks(tasks: Sequence[PromptTask]) -> None:
    """Raise TypeError for a tensor in a task, StoreError for an id that is none."""
    assert_no_tensors(tasks, "tasks")
    for task in tasks:
        require_id(task.task_id, "task id")


def require_refs(refs: Sequence[SampleRef]) -> None:
    """Raise TypeError for a tensor in a reference, StoreError for an id that is none."""
    assert_no_tensors(refs, "refs")
    for ref in refs:
        require_id(ref.sample_id, "sample id")
