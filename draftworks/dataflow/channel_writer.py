"""The writer's side of a reference channel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from draftworks.dataflow.channel_files import (
    REFS,
    EndMarker,
    SideLock,
    cannot_write,
    describe_sides,
    end_side,
    read_consumed,
    read_end,
    remove_end,
    write_end,
    write_header,
)
from draftworks.dataflow.channel_reader import LineFile
from draftworks.dataflow.id_set import SampleIdSet
from draftworks.dataflow.ref_lines import RefCodec
from draftworks.dataflow.watermark import InFlight, Watermark, wait_for_room
from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.storage.files import fsync


class RefWriter:
    """Appends references. A context manager: leaving the block ends the stream, with a failure if an exception left it.

    A writer that is killed leaves whole lines and at most one that is cut off. The next writer removes that one and
    leaves out of what it publishes the samples that are in the channel already.

    Raises:
        StoreError: the channel has a writer, is of another version or damaged, or its folder cannot be written.

    Attributes:
        published: samples and bytes in the channel, those of former writers too.
    """

    def __init__(self, folder: Path, codec: RefCodec, idle_timeout_s: float, session: str) -> None:
        self._folder = folder
        self._codec = codec
        self._idle_timeout_s = idle_timeout_s
        self._session = session
        self._encode = codec.make_encoder()
        self._before = SampleIdSet()
        self._file = -1
        self.published = InFlight()
        self._lock = SideLock(folder, "writer")
        try:
            write_header(folder, codec.name)
            self._read_former_lines()
            end = read_end(folder, "writer")
            self._ended = end is not None and not end.failed
            if not self._ended:
                remove_end(folder, "writer")
        except OSError as error:
            self.release()
            raise cannot_write(folder, error) from error
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        end_side(self, error)

    @property
    def has_ended(self) -> bool:
        """Whether the stream came to its end, perhaps by a former writer; then nothing new can be published."""
        return self._ended

    def publish(self, ref: SampleRef) -> int:
        return self.publish_batch([ref])

    def publish_batch(self, refs: Iterable[SampleRef]) -> int:
        """Append references and flush them to the disk together; return how many were new to the channel.

        Raises:
            StoreError: the stream has ended, or the file cannot be written: open a new writer then.
            TypeError: a reference carries tensors; nothing is written.
        """
        new = [ref for ref in refs if not len(self._before) or ref.sample_id not in self._before]
        if not new:
            return 0
        if self._ended:
            raise StoreError(f"reference channel {self._folder} has ended: new references need a new channel")
        if self._file < 0:
            raise StoreError(f"this writer of reference channel {self._folder} gave its side up: open a new one")
        self._lock.confirm()
        try:
            lines = [line for ref in new for line in self._encode(ref)]
        except BaseException:
            self._encode = self._codec.make_encoder()  # it may remember lines that will not be written
            raise
        try:
            _write_whole(self._file, "".join(f"{line}\n" for line in lines).encode())
            os.fsync(self._file)
        except OSError as error:
            self.release()
            raise cannot_write(self._folder, error) from error
        self.published += InFlight.of(new)
        return len(new)

    @property
    def consumed_remote(self) -> InFlight:
        """What the consumer has consumed."""
        return read_consumed(self._folder)

    @property
    def in_flight_remote(self) -> InFlight:
        """What is published and not consumed."""
        return self.published - self.consumed_remote

    @property
    def is_consumer_done(self) -> bool:
        """Whether the consumer needs no more references. Raises StoreError with its reason if it failed."""
        end = read_end(self._folder, "consumer")
        if end is None or end.session != self._session:
            return False
        if end.failed:
            raise StoreError(f"the consumer of reference channel {self._folder} failed: {end.reason}")
        return True

    def wait_for_room(
        self, watermark: Watermark, more: InFlight, should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until `more` may be published; return False if `should_stop` said so or the consumer needs no more.

        Raises:
            StoreError: the consumer failed, or nothing was consumed within the idle timeout.
        """
        return wait_for_room(
            watermark,
            lambda: self.in_flight_remote,
            more,
            timeout_s=self._idle_timeout_s,
            describe_sides=lambda: describe_sides(self._folder),
            should_stop=lambda: should_stop() or self.is_consumer_done,
        )

    def close(self) -> None:
        """End the stream, and give up the writer's side."""
        if self._file >= 0 and not self._ended:
            self._ended = True
            write_end(self._folder, "writer", EndMarker(False, "", self.published.samples, self._session))
        self.release()

    def fail(self, reason: str) -> None:
        """Tell the consumer that no more references come, and why; give up the writer's side."""
        if not self._ended and self._lock.is_held:
            write_end(self._folder, "writer", EndMarker(True, reason, self.published.samples, self._session))
        self.release()

    def release(self) -> None:
        """Give up the writer's side without an end of the stream, as the end of the process does."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._lock.release()

    def _read_former_lines(self) -> None:
        """Cut off an incomplete last line, and learn what former writers published."""
        path = self._folder / REFS
        created = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if created:
            fsync(self._folder)
        lines = LineFile(path, self._codec)
        while refs := lines.read():
            self.published += InFlight.of(refs)
            for ref in refs:
                self._before.add(ref.sample_id)
        if lines.offset < os.fstat(self._file).st_size:
            os.ftruncate(self._file, lines.offset)
            os.fsync(self._file)


def _write_whole(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]
