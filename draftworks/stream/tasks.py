"""Capture tasks and their leases, as producers and the control plane exchange them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftworks.errors import StoreError

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
