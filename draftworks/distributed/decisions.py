"""Decisions that all ranks have to take alike: whether to go on, wait, end, stop or fail."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from draftworks.distributed.collectives import describe_error, gather_from_ranks, max_over_ranks
from draftworks.errors import StoreError

if TYPE_CHECKING:
    import torch.distributed as dist


class Verdict(IntEnum):
    """What a rank wants; of several, the greatest is done."""

    GO = 0
    WAIT = 1
    END = 2
    STOP = 3
    FAIL = 4


@dataclass(frozen=True)
class Decision:
    """A verdict, and the signal that asks for a stop."""

    verdict: Verdict
    signum: int = 0


_SIGNALS = 256


def agree(own: Decision, error: Exception | None = None, group: dist.ProcessGroup | None = None) -> Decision:
    """Return the greatest decision of all ranks; two collectives at most, the second one only for a failure.

    Args:
        error: why this rank fails, with `Verdict.FAIL`.

    Raises:
        Exception: on the ranks that failed, their own error.
        StoreError: on the other ranks, the first error of one that failed, with its rank.
    """
    found = max_over_ranks(own.verdict * _SIGNALS + own.signum, group)
    decision = Decision(Verdict(found // _SIGNALS), found % _SIGNALS)
    if decision.verdict is Verdict.FAIL:
        reasons = gather_from_ranks(None if error is None else describe_error(error), group)
        if error is not None:
            raise error
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text is not None)
        raise StoreError(f"rank {rank}: {reason}")
    return decision
