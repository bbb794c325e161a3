"""Acknowledgement of an optimizer step by data-parallel ranks: one transaction of rank 0, then every rank frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

from draftworks.dataflow.control_plane import ControlPlane
from draftworks.distributed.collectives import gather_from_ranks, get_rank, run_on_every_rank
from draftworks.errors import StoreError

if TYPE_CHECKING:
    import torch.distributed as dist


class DPAckController:
    """Acknowledges what the ranks trained, at the optimizer boundary. All methods are collectives.

    Without `plane.durable_ack` there is no communication: every rank frees its own samples.

    Args:
        plane: used on rank 0 only; other ranks may hold one of any store.
        free: called on every rank with its own sample ids once they may go, after the transaction.
        free_at: "ack" frees at the optimizer boundary; a restart from an older checkpoint captures these samples again.
            "checkpoint" frees when a complete checkpoint covers the step, and keeps as much until then.
        group: for small Python values; by default the group of all ranks.
    """

    def __init__(
        self,
        plane: ControlPlane,
        free: Callable[[Sequence[str]], object],
        free_at: Literal["ack", "checkpoint"] = "ack",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._plane = plane
        self._free = free
        self._free_at = free_at
        self._group = group
        self._waiting: list[tuple[int, tuple[str, ...]]] = []

    @property
    def waiting_samples(self) -> int:
        """Samples of this rank that are acknowledged and wait for a checkpoint to be freed."""
        return sum(len(sample_ids) for _, sample_ids in self._waiting)

    def ack_step(self, sample_ids: Sequence[str], global_step: int, epoch: int = 0) -> int:
        """Acknowledge this rank's samples of an optimizer step with those of all others; return how many there are.

        Raises:
            StoreError: on every rank: two ranks trained one sample, or the transaction failed. Nothing is freed.
        """
        mine = tuple(sample_ids)
        count = len(mine)
        if self._plane.durable_ack:
            count = self._commit(mine, global_step, epoch)
        if self._free_at == "ack":
            run_on_every_rank(lambda: self._free(mine), self._group) if self._plane.durable_ack else self._free(mine)
        else:
            self._waiting.append((global_step, mine))
        return count

    def record_checkpoint(self, global_step: int) -> None:
        """Record a complete checkpoint, and free what waited for one. Call it after the checkpoint is on the disk."""
        covered = [each for step, sample_ids in self._waiting if step <= global_step for each in sample_ids]
        if self._plane.durable_ack:
            controller = self._plane.controller
            self._on_rank_0(lambda: controller.record_checkpoint(global_step))
        self._waiting = [waiting for waiting in self._waiting if waiting[0] > global_step]
        if covered:
            self._free(covered)

    def _commit(self, mine: tuple[str, ...], global_step: int, epoch: int) -> int:
        every = list(chain.from_iterable(gather_from_ranks(mine, self._group)))
        twice = [sample_id for sample_id, count in Counter(every).items() if count > 1]
        if twice:
            raise StoreError(f"step {global_step}: sample {twice[0]} was trained twice, by two ranks or by one")
        self._on_rank_0(lambda: self._plane.controller.ack(every, global_step, epoch))
        return len(every)

    def _on_rank_0(self, action: Callable[[], object]) -> None:
        run_on_every_rank(action if get_rank() == 0 else _do_nothing, self._group)


def _do_nothing() -> None:
    pass
