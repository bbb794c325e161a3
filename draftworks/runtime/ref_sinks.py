"""Where producers of a stream publish references: a queue of the same process, or a channel to another one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from draftworks.dataflow.channel_writer import RefWriter
from draftworks.dataflow.id_set import SampleIdSet
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import SampleRefQueue
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.errors import DraftworksError, StoreError
from draftworks.features.contracts import SampleRef

ShouldStop = Callable[[], bool]


class RefSink(ABC):
    """References of one stream, from any number of threads. Between `reserve` and `publish` a thread holds `lock`.

    A context manager: leaving the block ends the stream, or fails it with the exception that left it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    def open(self) -> None:  # noqa: B027 - a queue is open
        """Take the stream. Does nothing if this is done already."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing more is wanted: the stream has ended before, or its consumer needs no more."""

    @abstractmethod
    def reserve(self, sizes: Sequence[InFlight], should_stop: ShouldStop) -> int:
        """Wait until the next sample may be stored; return how many may.

        0 if `should_stop` said so first, or nothing more is wanted.

        Raises:
            StoreError: the consumer failed, or consumed nothing within the idle timeout.
        """

    @abstractmethod
    def publish(self, refs: Iterable[SampleRef]) -> None:
        """Append references; what is in the stream already is left out."""

    @abstractmethod
    def has_seen(self, sample_id: str) -> bool:
        """Whether a sample is known to be in the stream, or trained before, so that it need not be captured."""

    @abstractmethod
    def close(self) -> None:
        """End the stream."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the consumer that no more comes, and why."""


class QueueSink(RefSink):
    """A queue between threads."""

    def __init__(self, queue: SampleRefQueue) -> None:
        super().__init__()
        self._queue = queue

    @property
    def is_over(self) -> bool:
        return self._queue.is_closed

    def reserve(self, sizes: Sequence[InFlight], should_stop: ShouldStop) -> int:
        if not self._queue.wait_for_room(sizes[0], should_stop):
            return 0
        return _count_fitting(self._queue.watermark, self._queue.in_flight, sizes)

    def publish(self, refs: Iterable[SampleRef]) -> None:
        self._queue.put(refs)

    def has_seen(self, sample_id: str) -> bool:
        return self._queue.has_seen(sample_id)

    def close(self) -> None:
        self._queue.close()

    def fail(self, error: BaseException) -> None:
        self._queue.abort(error)


class ChannelSink(RefSink):
    """A channel to a process, which may be on another machine; `open` takes the writer's side.

    Args:
        watermark: limit of what is published and not acknowledged, in samples and bytes.

    Raises:
        StoreError: from `open`, as `RefWriter`.
    """

    def __init__(self, channel: StreamingRefChannel, watermark: Watermark) -> None:
        super().__init__()
        self._channel = channel
        self._watermark = watermark
        self._writer: RefWriter | None = None
        self._published = SampleIdSet()

    def open(self) -> None:
        if self._writer is None:
            self._writer = self._channel.open_writer()

    @property
    def is_over(self) -> bool:
        return self._open_writer.has_ended or self._open_writer.is_consumer_done

    def reserve(self, sizes: Sequence[InFlight], should_stop: ShouldStop) -> int:
        if not self._open_writer.wait_for_room(self._watermark, sizes[0], should_stop):
            return 0
        return _count_fitting(self._watermark, self._open_writer.in_flight_remote, sizes)

    def publish(self, refs: Iterable[SampleRef]) -> None:
        self._open_writer.publish_batch([ref for ref in refs if self._published.add(ref.sample_id)])

    def has_seen(self, sample_id: str) -> bool:
        return False  # the control plane knows what is committed

    def close(self) -> None:
        self._open_writer.close()

    def fail(self, error: BaseException) -> None:
        reason = str(error) if isinstance(error, DraftworksError) else f"{type(error).__name__}: {error}"
        self._open_writer.fail(reason)

    @property
    def _open_writer(self) -> RefWriter:
        if self._writer is None:
            raise StoreError(f"reference channel {self._channel.folder}: its writer's side is not taken yet")
        return self._writer


def _count_fitting(watermark: Watermark, in_flight: InFlight, sizes: Sequence[InFlight]) -> int:
    """Return how many of the next samples have room together; the first has."""
    for count, more in enumerate(sizes):
        in_flight += more
        if count and not watermark.has_room(in_flight, more=InFlight()):
            return count
    return len(sizes)
