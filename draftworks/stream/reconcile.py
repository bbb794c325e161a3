"""What a consumer that starts again has to do over, decided from its acknowledgements and its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureStore, KeyedFeatureStore, SampleRef
from draftworks.storage.words import list_names
from draftworks.stream.controller import PAGE, DataFlowController

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
