"""A training in arrival order: from a queue of references to optimizer steps, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftworks.config.registry_files import TrainingSpec
from draftworks.dataflow.control_plane import ControlPlane
from draftworks.dataflow.distributor import RefDistributor
from draftworks.dataflow.order_log import OrderLog, read_trained_ids
from draftworks.dataflow.ref_queues import RefQueue
from draftworks.distributed.collectives import get_rank, get_world_size, run_on_every_rank
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.features.contracts import FeatureStore
from draftworks.features.packing import PackLimits
from draftworks.features.queue_loader import QueueDataLoader, packed_steps, padded_steps
from draftworks.runtime.step_acks import FreeAt, StepAcks

OpenQueue = Callable[[Iterable[str]], RefQueue]
"""Opens the queue; gets the ids of samples that a resumed training has behind it, which the queue leaves out."""


@dataclass(frozen=True)
class ArrivalStream:
    """A rank's end of a training in arrival order: what its loader reads from, and what listens to its steps.

    Attributes:
        queue, order_log: on rank 0; None on the others, and `order_log` where the order is not logged.
        start_step: the optimizer step of the checkpoint from which the training resumes.
    """

    loader: QueueDataLoader
    acks: StepAcks
    distributor: RefDistributor
    queue: RefQueue | None
    order_log: OrderLog | None
    store: FeatureStore
    start_step: int

    @classmethod
    def open(
        cls,
        open_queue: OpenQueue,
        store: FeatureStore,
        strategy: DraftStrategy,
        training: TrainingSpec,
        plane: ControlPlane,
        order_log: Path | None = None,
        start_step: int = 0,
        free_at: FreeAt = "step",
        stop_signal: Callable[[], int] = lambda: 0,
        prefetch: int = 2,
    ) -> ArrivalStream:
        """Open the stream on every rank. A collective.

        Args:
            open_queue: called on rank 0.
            store: holds, for each sample, the features that the strategy reads, `input_ids` and `loss_mask`.
            order_log: file of the order of training, which a resumed training needs: from it come the samples that were
                trained. It is cut to `start_step`.

        Raises:
            ConfigError: a training resumes without `order_log`; the watermark of the queue is below a global batch; or a
                global batch cannot be divided among micro-batches and ranks.
            StoreError: on all ranks, the queue or the log cannot be used.
        """
        if order_log is None and start_step > 0:
            raise ConfigError(
                f"a training in arrival order resumes after step {start_step}: expected the order_log of its first part, "
                "which names the samples that were trained, found none"
            )

        def begin() -> tuple[RefQueue | None, OrderLog | None, RefDistributor]:
            size, queue, log = training.global_batch_size, None, None
            if get_rank() == 0:
                # Opened before the log is cut: a channel refuses a second consumer.
                queue = open_queue(() if order_log is None else read_trained_ids(order_log, start_step))
            try:
                if queue is not None and order_log is not None:
                    log = OrderLog(order_log, size, start_step)
                return queue, log, RefDistributor(queue, size, log, start_step, stop_signal)
            except BaseException as error:
                if queue is not None:
                    queue.abort(error)
                raise

        queue, log, distributor = run_on_every_rank(begin)
        rank, world, size = get_rank(), get_world_size(), training.global_batch_size
        if training.pack_tokens is None:
            split, collate = padded_steps(size, training.micro_batch_size, rank, world), strategy.collate
        else:
            limits = PackLimits(training.pack_tokens, training.pack_overlong)
            split, collate = packed_steps(size, limits, rank, world), strategy.pack
        loader = QueueDataLoader(distributor, store, split, collate, prefetch)
        assert loader.leases is not None
        acks = StepAcks(
            loader.leases,
            plane,
            free_at=free_at,
            read_dealt=lambda: distributor.oldest_step,
            on_acked=distributor.ack_step,
        )
        return cls(loader, acks, distributor, queue, log, store, start_step)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Context of the training, see `StepAcks.follow`; its end tells the producers that no more is needed, or why."""
        try:
            with self.acks.follow(self.start_step, self.store):
                yield
        except BaseException as error:
            self.end(error)
            raise
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Close the log, and tell the producers that no more is needed, or that their consumer failed."""
        if self.order_log is not None:
            self.order_log.close()
        if self.queue is not None:
            self.queue.close() if error is None else self.queue.abort(error)
