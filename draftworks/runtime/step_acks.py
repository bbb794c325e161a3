"""Acknowledgement of a training's steps by all of its ranks, for sets whose features are not captured again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from draftworks.dataflow.consumer_lease import ConsumerLease, hold_consumer
from draftworks.dataflow.control_plane import ControlPlane
from draftworks.dataflow.dp_ack import DPAckController
from draftworks.dataflow.reconcile import reconcile_on_restart
from draftworks.distributed.collectives import get_rank, max_over_ranks, run_on_every_rank
from draftworks.errors import ConfigError
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.step_leases import StepLeases

FreeAt = Literal["step", "checkpoint"]
log = logging.getLogger(__name__)


class StepAcks:
    """Step listener of every rank: acknowledges the samples of each optimizer step, and ends their leases.

    Ending the last lease of a sample frees it in a consume-once store, and does nothing in one that retains it. All
    methods are collectives, except `on_checkpoint`: with `save_async`, ranks learn of a checkpoint at different steps.

    Args:
        leases: of the rank's training loader.
        steps_per_epoch: None where there is one epoch.
        free_at: `step` ends the leases when the step is done, `checkpoint` when a complete checkpoint covers it, so that
            a training that resumes finds what it repeats.
        read_dealt: on rank 0, returns the references of the step, which are committed if no producer has.
        on_acked: called on every rank once a step is acknowledged.
    """

    def __init__(
        self,
        leases: StepLeases,
        plane: ControlPlane,
        steps_per_epoch: int | None = None,
        free_at: FreeAt = "step",
        read_dealt: Callable[[], Sequence[SampleRef]] = tuple,
        on_acked: Callable[[], None] = lambda: None,
    ) -> None:
        self._leases = leases
        self._plane = plane
        self._steps_per_epoch = steps_per_epoch
        self._acks = DPAckController(plane, leases.release, "ack" if free_at == "step" else "checkpoint")
        self._read_dealt = read_dealt
        self._on_acked = on_acked
        self._held: ConsumerLease | None = None
        self._complete = 0
        self._recorded = 0

    def on_step(self, global_step: int) -> None:
        """Acknowledge the step in one transaction; the queue counts its samples as consumed afterwards."""
        if self._plane.durable_ack:
            run_on_every_rank(self._prepare if get_rank() == 0 else _do_nothing)
        epoch = 0 if self._steps_per_epoch is None else (global_step - 1) // self._steps_per_epoch
        self._acks.ack_step(self._leases.last_step, global_step, epoch)
        self._on_acked()
        self._record_checkpoint()

    def on_checkpoint(self, global_step: int) -> None:
        """Remember that this rank has seen a complete checkpoint; it is recorded when all ranks have."""
        self._complete = global_step

    @contextmanager
    def follow(self, global_step: int, store: FeatureStore | None, uses: int = 1, frees: bool = True) -> Iterator[None]:
        """Context of the training after `global_step`: rank 0 holds the consumer's identity in it. A collective.

        What a stopped or killed training acknowledged after `global_step` is undone.

        Args:
            store: where the features are, to look for lost ones.
            uses: epochs that take each sample.
            frees: whether features whose acknowledgement a checkpoint covers are freed, where a kill left them.

        Raises:
            StoreError: on all ranks: another process trains as this consumer, or features are gone and cannot be made
                again.
        """
        with ExitStack() as held:

            def begin() -> None:
                controller = self._plane.controller
                self._held = held.enter_context(hold_consumer(controller))
                found = reconcile_on_restart(controller, store, global_step, uses, free_released=frees)
                log.info(
                    "the training continues after step %d: %d samples released, %d requeued, %d captured again%s",
                    *(found.global_step, len(found.released), len(found.requeued), len(found.recaptured)),
                    "" if found.optimizer_durable else "; what was acknowledged beyond the checkpoint is undone",
                )

            if self._plane.durable_ack:
                run_on_every_rank(begin if get_rank() == 0 else _do_nothing)
            yield
            self._record_checkpoint()

    def finish(self) -> None:
        """End the leases of what was read ahead, once the training is done. One that was stopped still needs it."""
        self._record_checkpoint()
        self._leases.release_all()

    def _prepare(self) -> None:
        """Check that this process still is the consumer, and commit the step's references that nobody has."""
        if self._held is not None:
            self._held.require_held()
        refs, controller = self._read_dealt(), self._plane.controller
        missing = set(controller.find_uncommitted([ref.sample_id for ref in refs]))
        if missing:
            controller.commit_samples([ref for ref in refs if ref.sample_id in missing])

    def _record_checkpoint(self) -> None:
        """Record the newest checkpoint that every rank has seen."""
        complete = -max_over_ranks(-self._complete)
        if complete > self._recorded:
            self._acks.record_checkpoint(complete)
            self._recorded = complete


def require_fresh(plane: ControlPlane) -> None:
    """Raise ConfigError, on all ranks, if a training has acknowledged steps of this run before. A collective."""
    acked = 0
    if plane.durable_ack and get_rank() == 0:
        acked = plane.controller.read_progress().acked_step
    acked = max_over_ranks(acked)
    if acked:
        raise ConfigError(
            f"run {plane.controller.run_id}: expected a new run, found one that has acknowledged {acked} steps. Continue it "
            "with resume=True, or choose another run_id or metadata_db_path"
        )


def _do_nothing() -> None:
    pass
