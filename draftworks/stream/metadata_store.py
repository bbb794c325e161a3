"""The control plane's state: records of tasks, references and acknowledgements, and the interface of its stores.

Every method of a store is one transaction over all of its arguments, and can be repeated with the same arguments without
harm: a client that lost the answer calls again. Times are seconds of `time.time()`; `now` is the caller's clock.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from draftworks.errors import ConfigError, StoreError
from draftworks.features.contracts import SampleRef, assert_no_tensors

MAX_ID_LENGTH = 512
_ID = re.compile(rf"[^\x00-\x1f\x7f\ud800-\udfff]{{1,{MAX_ID_LENGTH}}}")


@dataclass(frozen=True)
class PromptTask:
    """Samples that one producer captures in one visit to the target.

    Attributes:
        sample_ids: samples of the plan; empty where the producer makes them from prompts (rollouts).
        prompts_uri: where the prompts are, if they are not samples of a tokenized set.
        step: the optimizer step that first takes one of the samples; tasks are leased in this order.
        num_tokens: tokens of all samples, for batching and rates.
        size: samples and bytes that a watermark counts for the task; None where steps alone are counted.
    """

    task_id: str
    run_id: str
    sample_ids: tuple[str, ...] = ()
    prompts_uri: str = ""
    step: int = 0
    num_tokens: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class TaskLease:
    """The right of one worker to a task until `expires_at`.

    Attributes:
        attempt: grows with every lease of the task.
        failures: attempts that failed before, or whose lease ran out.
        frees: how many keys of the run had been freed at the lease; what the worker finds in the store afterwards is
            committed with it.
    """

    task: PromptTask
    worker: str
    attempt: int
    expires_at: float
    failures: int = 0
    frees: int = 0


@dataclass(frozen=True)
class TaskFailure:
    """Why a worker gives a leased task back; `counts` is whether that was an attempt, and not another task's fault."""

    lease: TaskLease
    reason: str
    counts: bool = True


@dataclass(frozen=True)
class DeadLetter:
    """A task that failed as often as it may, with the reason of every attempt.

    Attributes:
        lost_samples: its samples that were never committed.
    """

    task: PromptTask
    reasons: tuple[str, ...]
    lost_samples: tuple[str, ...]


@dataclass(frozen=True)
class TaskCounts:
    """How many tasks of a run are in each state."""

    pending: int = 0
    leased: int = 0
    done: int = 0
    dead: int = 0

    @property
    def open(self) -> int:
        """Tasks that are neither done nor dead."""
        return self.pending + self.leased


def require_id(value: str, kind: str) -> str:
    """Return `value` if it is a usable id: 1 to `MAX_ID_LENGTH` characters, no control characters. Else StoreError."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        shown = repr(value)
        raise StoreError(
            f"{kind}: expected text of 1 to {MAX_ID_LENGTH} characters without control characters, "
            f"found {shown if len(shown) <= 80 else shown[:77] + '...'}"
        )
    return value


IDLE_TIMEOUT_S = 1800.0
"""The longest that one side of a stream waits while the other does nothing."""


@dataclass(frozen=True)
class InFlight:
    """What was produced and is not consumed yet; `steps` is None where nobody counts optimizer steps."""

    samples: int = 0
    bytes: int = 0
    steps: int | None = None

    def __add__(self, other: InFlight) -> InFlight:
        steps = None if self.steps is None and other.steps is None else (self.steps or 0) + (other.steps or 0)
        return InFlight(self.samples + other.samples, self.bytes + other.bytes, steps)

    def __sub__(self, other: InFlight) -> InFlight:
        steps = None if self.steps is None else self.steps - (other.steps or 0)
        return InFlight(self.samples - other.samples, self.bytes - other.bytes, steps)

    def __str__(self) -> str:
        steps = "" if self.steps is None else f", {self.steps} steps"
        return f"{self.samples} samples, {self.bytes:,} bytes{steps}"


@dataclass(frozen=True)
class Watermark:
    """Upper limits of what is in flight; None does not limit.

    A consumer frees room only after a whole optimizer step, so a limit below one global batch would stop both sides for
    ever: `require_batch` refuses it.

    Raises:
        ConfigError: a limit is not positive, or there is none.
    """

    samples: int | None = 256
    bytes: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        if all(limit is None for limit in limits.values()):
            raise ConfigError("watermark: expected a limit of samples, bytes or steps, found none")
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise ConfigError(f"watermark.{name}: expected at least 1, found {limit}")

    def require_batch(self, batch: InFlight) -> Watermark:
        """Return the watermark if `batch`, the most that one optimizer step takes, fits below it; else ConfigError."""
        for bound in fields(self):
            limit, needed = getattr(self, bound.name), getattr(batch, bound.name)
            if limit is not None and needed is not None and needed > limit:
                raise ConfigError(
                    f"watermark.{bound.name}: expected at least one global batch, {needed:,}, found {limit:,}. The "
                    f"producer would wait for room, and the trainer for the rest of the batch. Raise it to {needed:,} "
                    "or more, or lower training.global_batch_size"
                )
        return self

    def for_batches_of(self, samples: int) -> Watermark:
        """Return the watermark with `steps` expressed in samples, for streams that count no steps."""
        if self.steps is None:
            return self
        limit = self.steps * samples
        return Watermark(limit if self.samples is None else min(self.samples, limit), self.bytes)


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
