"""A producer in a thread beside a trainer: whoever ends or fails first ends the other, with the first cause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.errors import StoreError
from draftworks.runtime.arrival_producer import OnlineProducer, drive_producer
from draftworks.runtime.ref_sinks import ShouldStop
from draftworks.runtime.trainer_runtime import TrainerRuntime
from draftworks.training.history import History

log = logging.getLogger(__name__)


def run_disagg_online_interleaved(
    consumer: TrainerRuntime, producer: OnlineProducer, join_timeout_s: float = 120.0
) -> History:
    """Train on this thread while producers run on others.

    A source that is exhausted ends the stream, and the trainer trains what is left in it. A trainer that is done first
    tells the producers to stop.

    Args:
        join_timeout_s: how long the producers may take to stop once training is over.

    Raises:
        BaseException: the producers' own error, where they failed before training was over; else what training raises.
        StoreError: the producers did not stop in time.
    """
    return interleave(consumer, producer, join_timeout_s).run()


def interleave(consumer: TrainerRuntime, producer: OnlineProducer, join_timeout_s: float = 120.0) -> TrainerRuntime:
    """Return the runtime that does so; see `run_disagg_online_interleaved`."""

    @contextmanager
    def follow() -> Iterator[None]:
        with consumer.follow():
            producer.sink.open()  # here, since the trainer does not learn of a stream that nobody could begin
            with produce_beside(partial(drive_producer, producer), join_timeout_s):
                yield

    return TrainerRuntime(consumer.trainer, consumer.loader, follow, consumer.finish)


@contextmanager
def produce_beside(drive: Callable[[ShouldStop], object], join_timeout_s: float) -> Iterator[None]:
    """Context with a producer in a thread, which is told to stop at its end; its error is raised there."""
    stop, failures = threading.Event(), []

    def work() -> None:
        block_stop_signals()
        try:
            drive(stop.is_set)
        except BaseException as error:
            failures.append(error)

    def end(error: BaseException | None) -> None:
        stop.set()
        thread.join(join_timeout_s)
        if failures:
            raise failures[0] from error
        if thread.is_alive():
            late = StoreError(
                f"the producer has not stopped within {join_timeout_s:g} s after training was over: its engine hangs, or "
                "takes longer for a batch. Look at its log, or raise join_timeout_s"
            )
            if error is None:
                raise late
            log.warning("%s", late)

    thread = threading.Thread(target=work, name="producer", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        end(error)
        raise
    end(None)
