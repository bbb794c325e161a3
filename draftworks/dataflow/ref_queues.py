"""Queues of references with acknowledgement: in memory between threads, and over a channel between processes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from draftworks.dataflow.channel_reader import RefReader
from draftworks.dataflow.id_set import SampleIdSet
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.errors import DraftworksError, StoreError
from draftworks.features.contracts import SampleRef

IDLE_TIMEOUT_S = 1800.0


class RefQueue(ABC):
    """References in order, each handed out once. Whoever takes one acknowledges it or gives it up by `fail`.

    A sample that comes a second time is left out and counts as consumed, so it never takes a place in a batch.
    """

    @property
    @abstractmethod
    def is_drained(self) -> bool:
        """Whether the producers have ended and every reference was handed out."""

    @abstractmethod
    def get(self, count: int, wait_s: float | None = None) -> list[SampleRef]:
        """Return the next references, at most `count`; none if the queue is drained or none came within `wait_s` seconds.

        Args:
            wait_s: None waits until there is one or the queue is drained, up to the idle timeout.

        Raises:
            StoreError: the idle timeout has passed.
            DraftworksError: what made the producers fail.
        """

    @abstractmethod
    def ack(self, sample_ids: Iterable[str]) -> None:
        """Count handed-out references as consumed. Raises ValueError if one is not handed out, and counts none then."""

    @abstractmethod
    def fail(self, sample_ids: Iterable[str], *, requeue: bool = False) -> None:
        """Give handed-out references up: they count as consumed, or with `requeue` are the next to be handed out.

        Raises:
            ValueError: one is not handed out; nothing changes then.
        """

    @abstractmethod
    def close(self) -> None:
        """End the queue: producers need to give no more."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell the producers that their consumer failed, and why."""

    @abstractmethod
    def require_batch(self, batch: InFlight) -> None:
        """Raise ConfigError if so much can never be handed out together."""


class _HandedOut:
    """References that were handed out and are neither acknowledged nor given up."""

    def __init__(self) -> None:
        self._refs: dict[str, SampleRef] = {}

    def add(self, refs: Iterable[SampleRef]) -> None:
        self._refs.update((ref.sample_id, ref) for ref in refs)

    def take(self, sample_ids: Iterable[str]) -> list[SampleRef]:
        """Remove and return references; ValueError for one that is not handed out."""
        sample_ids = list(sample_ids)
        unknown = set(sample_ids) - self._refs.keys()
        if unknown or len(set(sample_ids)) < len(sample_ids):
            raise ValueError(f"samples {sorted(unknown) or sample_ids} are not handed out, or named twice")
        return [self._refs.pop(sample_id) for sample_id in sample_ids]


class SampleRefQueue(RefQueue):
    """A bounded queue between threads of one process.

    Args:
        watermark: limits what is queued or handed out; `put` waits for room.
        idle_timeout_s: the longest wait of either side in which the other one does nothing.
        skip_ids: samples that were durably trained before: left out.
    """

    def __init__(
        self,
        watermark: Watermark | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        skip_ids: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watermark = watermark or Watermark()
        self._idle_timeout_s = idle_timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[SampleRef] = deque()
        self._handed_out = _HandedOut()
        self._seen = SampleIdSet(skip_ids)
        self._in_flight = InFlight()
        self._closed = False
        self._failure: BaseException | None = None
        self._clock = clock
        self._last_change = clock()
        self._starved_since: float | None = None

    @property
    def in_flight(self) -> InFlight:
        """What is queued or handed out."""
        return self._in_flight

    @property
    def is_drained(self) -> bool:
        with self._changed:
            return self._closed and not self._waiting

    def require_batch(self, batch: InFlight) -> None:
        self._watermark.require_batch(batch)

    @property
    def watermark(self) -> Watermark:
        return self._watermark

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be put any more."""
        return self._closed

    def has_seen(self, sample_id: str) -> bool:
        """Whether the sample was put before, or is left out."""
        with self._changed:
            return sample_id in self._seen

    def wait_for_room(self, more: InFlight, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until `more` may be put; return False if `should_stop` said so first, or the queue is closed.

        Raises:
            StoreError, DraftworksError: as `put`.
        """
        self._watermark.require_piece(more)
        with self._changed:
            room = self._wait_for(partial(self._has_room, more), lambda: self._closed or should_stop(), self._clock())
            return room and not self._closed

    def put(self, refs: Iterable[SampleRef], should_stop: Callable[[], bool] = lambda: False) -> int:
        """Append references one by one as there is room; return how many were new.

        Stops early where `should_stop` says so, which is asked several times a second.

        Raises:
            StoreError: the queue is closed; nothing was consumed within the idle timeout; or a reference exceeds the
                watermark alone.
            DraftworksError: what made the consumer or another producer fail.
        """
        added = 0
        for ref in refs:
            since = self._clock()
            more = InFlight.of([ref])
            self._watermark.require_piece(more)
            with self._changed:
                if ref.sample_id in self._seen:
                    continue
                has_room = partial(self._has_room, more)
                if not self._wait_for(has_room, should_stop, since):
                    return added
                if self._closed:
                    raise StoreError("the queue of references is closed: nothing can be put into it")
                if self._seen.add(ref.sample_id):  # another producer may have put it meanwhile
                    self._waiting.append(ref)
                    self._in_flight += more
                    self._note_change()
                    added += 1
        return added

    def get(self, count: int, wait_s: float | None = None) -> list[SampleRef]:
        until = None if wait_s is None else self._clock() + wait_s
        with self._changed:
            # A wait in several calls is one wait: it goes on since the first of them.
            since = self._starved_since or self._clock()
            if self._wait_for(
                lambda: bool(self._waiting) or self._closed,
                lambda: until is not None and self._clock() >= until,
                since,
            ):
                self._starved_since = None
            elif wait_s:
                self._starved_since = since
            refs = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            self._handed_out.add(refs)
            return refs

    def ack(self, sample_ids: Iterable[str]) -> None:
        with self._changed:
            self._in_flight -= InFlight.of(self._handed_out.take(sample_ids))
            self._note_change()

    def fail(self, sample_ids: Iterable[str], *, requeue: bool = False) -> None:
        if not requeue:
            self.ack(sample_ids)
            return
        with self._changed:
            self._waiting.extendleft(reversed(self._handed_out.take(sample_ids)))
            self._note_change()

    def close(self) -> None:
        """End the queue: what is in it is still handed out."""
        with self._changed:
            self._closed = True
            self._note_change()

    def abort(self, error: BaseException) -> None:
        """Raise `error` from every `get` and `put` from now on, on both sides; the first error stays."""
        with self._changed:
            self._failure = self._failure or error
            self._note_change()

    def _has_room(self, more: InFlight) -> bool:
        return self._watermark.has_room(self._in_flight, more)

    def _note_change(self) -> None:
        self._last_change = self._clock()
        self._changed.notify_all()

    def _wait_for(self, is_ready: Callable[[], bool], is_over: Callable[[], bool], since: float) -> bool:
        """Wait, with the lock held, until `is_ready`; return False if `is_over` came first.

        Raises:
            StoreError: nothing has changed for the idle timeout, counted from `since` at the earliest.
        """
        while True:
            if self._failure is not None:
                raise _as_own_error(self._failure)
            if is_ready():
                return True
            if is_over():
                return False
            if self._clock() - max(since, self._last_change) > self._idle_timeout_s:
                raise StoreError(
                    f"the queue of references did not move for {self._idle_timeout_s:g} s: {len(self._waiting)} wait in "
                    f"it, {self._in_flight} are in flight. The other side, a thread of this process, hangs or has ended "
                    "without closing the queue"
                )
            self._changed.wait(min(0.1, self._idle_timeout_s / 4))


class StreamingRefQueue(RefQueue):
    """The references of a channel, for the process that consumes them.

    Args:
        reader: the consumer's side of the channel, which the queue uses alone.
        skip_ids: samples that were durably trained before: left out, and counted as consumed.

    Attributes:
        num_skipped: references that were left out, because of `skip_ids` or as second ones of their sample.
    """

    def __init__(self, reader: RefReader, skip_ids: Iterable[str] = ()) -> None:
        self.num_skipped = 0
        self._reader = reader
        self._seen = SampleIdSet(skip_ids)
        self._waiting: deque[SampleRef] = deque()
        self._handed_out = _HandedOut()
        self._lock = threading.Lock()

    @property
    def is_drained(self) -> bool:
        with self._lock:
            return self._reader.has_ended and not self._waiting

    def require_batch(self, batch: InFlight) -> None:
        """Nothing to check: the watermark of a channel is its producer's."""

    def get(self, count: int, wait_s: float | None = None) -> list[SampleRef]:
        until = None if wait_s is None else time.monotonic() + wait_s
        while True:
            with self._lock:
                while not self._waiting and (polled := self._reader.poll()):
                    self._sort(polled)
                refs = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
                self._handed_out.add(refs)
                if refs or self._reader.has_ended:
                    return refs
            if until is not None and time.monotonic() >= until:
                return []
            self._reader.pause()  # without the lock, so that another thread can acknowledge

    def ack(self, sample_ids: Iterable[str]) -> None:
        with self._lock:
            refs = self._handed_out.take(sample_ids)
            if refs:
                self._reader.mark_consumed(InFlight.of(refs))

    def fail(self, sample_ids: Iterable[str], *, requeue: bool = False) -> None:
        if not requeue:
            self.ack(sample_ids)
            return
        with self._lock:
            self._waiting.extendleft(reversed(self._handed_out.take(sample_ids)))

    def close(self) -> None:
        """Tell the writer that no more references are needed."""
        self._reader.close()

    def abort(self, error: BaseException) -> None:
        """Tell the writer that the consumer failed, and why."""
        self._reader.fail(f"{type(error).__name__}: {error}")

    def _sort(self, polled: list[SampleRef]) -> None:
        """Queue the references that are new; count the others as consumed at once, so that the writer gets their room."""
        skipped = []
        for ref in polled:
            if self._seen.add(ref.sample_id):
                self._waiting.append(ref)
            else:
                skipped.append(ref)
        self.num_skipped += len(skipped)
        if skipped:
            self._reader.mark_consumed(InFlight.of(skipped))


def _as_own_error(error: BaseException) -> BaseException:
    """Return what another thread gets to raise for `error`: the same error of a user, with it as the cause."""
    if isinstance(error, DraftworksError):
        return error
    failure = StoreError(f"the other side of the queue of references failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
