"""The trainer's end of a training in arrival order whose producers run beside it, as processes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StreamPlace
from draftworks.distributed.collectives import broadcast_from_rank_0, get_rank, run_on_every_rank
from draftworks.distributed.stop_signals import Interrupted
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import DataError, StoreError
from draftworks.features.open_store import open_store_to_write
from draftworks.storage.identity import DIGEST_LENGTH
from draftworks.stream.arrival_producer import LOOK_S, SOURCE, SourceFact
from draftworks.stream.arrival_stream import ArrivalStream
from draftworks.stream.controller import LOCAL_COLOCATED, ControlPlane, DataFlowController, resolve_control_plane
from draftworks.stream.training_stream import open_controller


class ArrivalTraining:
    """A training in arrival order, from a step on: what its loader reads from, how long it is, and what it took.

    Features are kept until a checkpoint covers their step, so that one that goes on trains the same samples in the same
    order.

    Args:
        start_step: that of the checkpoint from which the training goes on, else 0.
        stop_signal: number of the signal that asks this rank to stop, or 0.

    Attributes:
        training: the settings, with the optimizer steps that `streaming.until` means as `max_steps`.

    Raises:
        DataError: the source ended before the first global batch.
        StoreError: the control plane cannot be used, or no producer has read the source within `timeout_s`.
    """

    def __init__(
        self,
        place: StreamPlace,
        training: TrainingSpec,
        strategy: DraftStrategy,
        start_step: int,
        stop_signal: Callable[[], int],
    ) -> None:
        plane = run_on_every_rank(
            lambda: (
                ControlPlane(open_controller(place), True)
                if get_rank() == 0
                else resolve_control_plane(LOCAL_COLOCATED, place.run_id)
            )
        )
        self._controller = plane.controller
        until = place.settings.until
        assert until is not None, "of a training in arrival order"
        steps = until.count_steps(training.global_batch_size)
        if steps is None:
            found = run_on_every_rank(
                lambda: _await_end(self._controller, place, stop_signal) if get_rank() == 0 else 0
            )
            steps = broadcast_from_rank_0(found) // training.global_batch_size
            if not steps:
                raise DataError(
                    f"the source has fewer samples than a global batch of {training.global_batch_size}: lower "
                    "training.global_batch_size, or give more data"
                )
        shortest = steps if training.max_steps is None else min(steps, training.max_steps)
        self.training = training.model_copy(update={"max_steps": shortest})
        self.stream = ArrivalStream(
            *(open_store_to_write(place.store), strategy, self.training, plane, start_step, "checkpoint"),
            *(stop_signal, place.settings.timeout_s),
        )

    def digest_order(self) -> str:
        """Return the digest of what each step took, in order, as the control plane has recorded it; on rank 0."""
        taken = hashlib.sha256()
        for each in self._controller.read_order():
            taken.update(json.dumps([each.step, *each.sample_ids]).encode() + b"\n")
        return taken.hexdigest()[:DIGEST_LENGTH]

    def count_rows(self) -> dict[str, int]:
        """Return what became of the source's rows until now, on rank 0."""
        known = self._controller.read_facts().get(SOURCE)
        return {} if known is None else dict(SourceFact(**json.loads(known)).counts or {})


def _await_end(controller: DataFlowController, place: StreamPlace, stop_signal: Callable[[], int]) -> int:
    """Return the samples of a source that is read to its end before the training begins."""
    until = time.monotonic() + place.settings.timeout_s
    while time.monotonic() < until:
        known = controller.read_facts().get(SOURCE)
        fact = None if known is None else SourceFact(**json.loads(known))
        if fact is not None and fact.is_whole:
            return fact.samples
        if signum := stop_signal():
            raise Interrupted(signum, " before the source was read")
        time.sleep(LOOK_S)
    raise StoreError(
        f"run {place.run_id}: the source was not read to its end in {place.settings.timeout_s:g} s: look at the producers' "
        "log. A source without an end needs streaming.until: steps or samples"
    )
