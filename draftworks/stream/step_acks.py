"""Acknowledgement of a training's steps, one transaction each; what is free by then, and what a restart has to do over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from draftworks.distributed.collectives import get_rank, max_over_ranks, run_on_every_rank
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.features.contracts import FeatureStore, KeyedFeatureStore, SampleRef
from draftworks.storage.words import list_names
from draftworks.stream.controller import PAGE, ControlPlane, DataFlowController
from draftworks.stream.leases import ConsumerLease, hold_consumer

FindLost = Callable[[Sequence[SampleRef]], Sequence[str]]


@dataclass(frozen=True)
class Reconciliation:
    """The samples of a run as its consumer finds them at a restart, by sample id in commit order.

    Attributes:
        requeued: to be trained again, or still to be trained.
        released: acknowledged at optimizer steps that a complete checkpoint covers; never delivered again.
        global_step: the optimizer step after which training continues.
        optimizer_durable: a complete checkpoint covers every step that was acknowledged, so that nothing was undone.
        recaptured: those of `requeued` whose features are gone; their tasks are open again.
    """

    requeued: tuple[str, ...]
    released: tuple[str, ...]
    global_step: int
    optimizer_durable: bool
    recaptured: tuple[str, ...] = ()


def reconcile_on_restart(
    controller: DataFlowController,
    feature_store: FeatureStore | None,
    global_step: int | None = None,
    uses: int = 1,
    release: bool = False,
    find_lost: FindLost | None = None,
) -> Reconciliation:
    """Undo acknowledgements beyond the checkpoint, and reopen the tasks of lost features.

    Can be repeated, also after it was interrupted.

    Args:
        feature_store: None where features are looked after elsewhere; nothing is searched for then.
        global_step: the checkpoint from which training resumes, 0 for none; by default the last recorded one.
        uses: epochs that take each sample; a sample is released after its last one.
        release: samples that the checkpoint covers need their features no longer, see `DataFlowController.free_keys`.
        find_lost: returns the samples whose features are gone. By default a content-keyed store is searched for their
            keys, and any other is not.

    Raises:
        StoreError: features of requeued samples are gone, and no task of the run can make them again.
    """
    before = controller.read_progress()
    step = before.checkpoint_step if global_step is None else global_step
    if before.acked_step > step or before.checkpoint_step != step:
        controller.rewind(step)
    released = tuple(ref.sample_id for ref in controller.iterate_refs(acked=True, uses=uses))
    if release and step:
        controller.record_checkpoint(step, release=True)
    if find_lost is None and isinstance(feature_store, KeyedFeatureStore):
        feature_store.refresh()
        find_lost = partial(_find_lost, feature_store)
    wanted, lost = [], []
    for refs in _pages(controller, acked=False, uses=uses):
        wanted += [ref.sample_id for ref in refs]
        lost += [] if find_lost is None else find_lost(refs)
    _reopen_lost(controller, lost)
    gone = frozenset(lost)
    kept = [sample_id for sample_id in wanted if sample_id not in gone]
    return Reconciliation((*kept, *lost), released, step, before.acked_step <= step, tuple(lost))


def _find_lost(store: KeyedFeatureStore, refs: Sequence[SampleRef]) -> list[str]:
    """Return the samples of which a content-keyed store lacks a feature."""
    missing = set(store.find_missing(key for ref in refs for key in ref.feature_keys.values()))
    return [ref.sample_id for ref in refs if not missing.isdisjoint(ref.feature_keys.values())]


def _reopen_lost(controller: DataFlowController, lost: Sequence[str]) -> None:
    hopeless: list[str] = []
    for start in range(0, len(lost), PAGE):
        hopeless += controller.requeue_lost(lost[start : start + PAGE])
    if hopeless:
        raise StoreError(
            f"run {controller.run_id}: the features of {len(hopeless)} samples that are to be trained again are gone, and "
            f"no task of the run can make them again: {list_names(hopeless)}. "
            "Resume from a checkpoint that covers them, or begin a new run"
        )


def _pages(controller: DataFlowController, acked: bool, uses: int) -> Iterator[tuple[SampleRef, ...]]:
    page = controller.read_refs(0, PAGE, acked, uses)
    while page.refs:
        yield page.refs
        page = controller.read_refs(page.cursor, PAGE, acked, uses)


FreeAt = Literal["step", "checkpoint", "never"]
FREE_AT = "free_at"
"""The fact of a run when its consumer frees features."""
FINISHED = "it has finished"
log = logging.getLogger(__name__)


class StepAcks:
    """Step listener of every rank: rank 0 acknowledges the samples of each optimizer step, and frees their features.

    Args:
        plane: used on rank 0.
        store: where features are freed; None where a set is stored for longer than a training.
        list_samples: on rank 0, returns the references of a step in the order of training.
        steps_per_epoch: None where there is one epoch.
        free_at: `step` frees features when the step is done, `checkpoint` when a complete checkpoint covers it, so that
            a training that resumes finds what it repeats; `never` keeps them.
    """

    def __init__(
        self,
        plane: ControlPlane,
        store: KeyedFeatureStore | None,
        list_samples: Callable[[int], Sequence[SampleRef]],
        steps_per_epoch: int | None = None,
        free_at: FreeAt = "step",
    ) -> None:
        self._controller = plane.controller
        self._store = store
        self._list_samples = list_samples
        self._steps_per_epoch = steps_per_epoch
        self._free_at = "never" if store is None else free_at
        self._freed: Sequence[str] = ()
        self._held: ConsumerLease | None = None

    def on_step(self, global_step: int) -> None:
        """Acknowledge the step, on rank 0. A collective, so that all ranks fail if that fails."""
        run_on_every_rank(lambda: self._ack(global_step) if get_rank() == 0 else None)

    def on_checkpoint(self, global_step: int) -> None:
        """Record, on rank 0, that a complete checkpoint covers all steps up to `global_step`."""
        if get_rank() == 0:
            self._controller.record_checkpoint(global_step, release=self._free_at != "never")
            self.free_unused()

    @contextmanager
    def follow(self, global_step: int, features: FeatureStore | None, uses: int = 1) -> Iterator[None]:
        """Context of the training after `global_step`: rank 0 holds the consumer's identity in it. A collective.

        What a stopped or killed training acknowledged after `global_step` is undone, and what it had no time to free is
        freed. Whoever fails says so to the producers.

        Args:
            features: where the features are, to look for lost ones.
            uses: epochs that take each sample.

        Raises:
            StoreError: on all ranks: another process trains as this consumer, or features are gone and cannot be made
                again.
        """
        with ExitStack() as held:

            def begin() -> None:
                self._held = held.enter_context(hold_consumer(self._controller))
                if self._controller.read_progress().left:
                    self._controller.record_left("")
                self._controller.record_fact(FREE_AT, self._free_at)
                found = reconcile_on_restart(
                    self._controller, features, global_step, uses, release=self._free_at != "never"
                )
                self.free_unused()
                log.info(
                    "the training continues after step %d: %d samples released, %d requeued, %d captured again%s",
                    *(found.global_step, len(found.released), len(found.requeued), len(found.recaptured)),
                    "" if found.optimizer_durable else "; what was acknowledged beyond the checkpoint is undone",
                )

            run_on_every_rank(lambda: begin() if get_rank() == 0 else None)
            try:
                yield
            except Exception as error:
                self._leave(error)
                raise

    def finish(self) -> None:
        """Free everything, once the training is done; one that was stopped still needs what was captured ahead."""
        if get_rank() == 0:
            self._controller.record_left(FINISHED)
            self.free_unused(everything=self._free_at != "never")

    def free_unused(self, everything: bool = False) -> None:
        """Free, on rank 0, what nothing needs any more; producers that found it in the store capture it again."""
        if self._store is not None:
            free_unused(self._controller, self._store, everything, self._freed)
            self._freed = ()

    def confirm(self) -> None:
        """Free what nothing needs any more, and let producers know what was freed: they may wait to capture it again.

        A producer that was late has put, after the last step, what it found committed and trained already. Until that is
        freed, another sample of the same content cannot be committed.
        """
        self.free_unused()

    def _ack(self, global_step: int) -> None:
        if self._held is not None:
            self._held.require_held()
        ids = [ref.sample_id for ref in self._list_samples(global_step)]
        epoch = 0 if self._steps_per_epoch is None else (global_step - 1) // self._steps_per_epoch
        release = self._free_at == "step"
        done = self._controller.ack_step(ids, global_step, epoch, release, self._freed)
        self._freed = ()
        if self._store is not None and done.unused:
            self._store.free(done.unused)
            self._freed = done.unused

    def _leave(self, error: Exception) -> None:
        if get_rank() == 0:
            try:
                self._controller.record_left(f"it has failed: {str(error).partition(chr(10))[0]}")
            except DraftworksError as other:
                log.warning("the producers were not told that the training has failed: %s", other)


def free_unused(
    controller: DataFlowController, store: KeyedFeatureStore, everything: bool = False, freed: Sequence[str] = ()
) -> None:
    """Remove the features from the store that no reference of the run needs, or with `everything` all of the run."""
    unused = controller.free_keys(freed, everything)
    if unused:
        store.refresh()
        store.free(unused)
        controller.free_keys(unused)


def require_fresh(plane: ControlPlane) -> None:
    """Raise ConfigError, on all ranks, if a training has acknowledged steps of this run before. A collective."""
    acked = max_over_ranks(plane.controller.read_progress().acked_step if get_rank() == 0 else 0)
    if acked:
        raise ConfigError(
            f"run {plane.controller.run_id}: expected a new run, found one that has acknowledged {acked} steps. Continue it "
            "with resume=True, or choose another run_id or metadata_db_path"
        )
