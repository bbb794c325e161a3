"""The consumer's side of a reference channel."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from draftworks.dataflow.channel_files import (
    REFS,
    EndMarker,
    SideLock,
    describe_sides,
    end_side,
    has_header,
    read_end,
    remove_end,
    write_consumed,
    write_end,
)
from draftworks.dataflow.ref_lines import RefCodec
from draftworks.dataflow.watermark import POLL_S, InFlight
from draftworks.errors import DraftworksError, StoreError
from draftworks.features.contracts import SampleRef
from draftworks.storage.files import open_regular

POLL_REFS = 1024
_CHUNK = 4 << 20
"""Bytes of one read; a line must be shorter."""


class LineFile:
    """Reads the whole lines of a growing file, each once; an incomplete last line is read again when there is more.

    The file is opened anew at every read, because network file systems then show what other machines have written.

    Attributes:
        offset: bytes of the lines that were read from the file, all of them whole.
    """

    def __init__(self, path: Path, codec: RefCodec) -> None:
        self.offset = 0
        self._path = path
        self._decode = codec.make_decoder()
        self._lines: deque[bytes] = deque()
        self._number = 0

    def read(self, limit: int = POLL_REFS) -> list[SampleRef]:
        """Return the next references, at most `limit`; none if there is no whole line.

        Raises:
            StoreError: a line is damaged, or the file lost lines that were read from it.
        """
        refs: list[SampleRef] = []
        while len(refs) < limit:
            if not self._lines and not self._read_lines():
                break
            line = self._lines.popleft()
            self._number += 1
            try:
                ref = self._decode(line.decode())
            except (ValueError, DraftworksError) as error:
                raise StoreError(
                    f"{self._path}, line {self._number}: expected a reference, found {line[:80]!r} ({error}). The channel "
                    "is damaged: use a new one, and publish again"
                ) from error
            if ref is not None:
                refs.append(ref)
        return refs

    def _read_lines(self) -> bool:
        try:
            with open_regular(self._path) as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(self.offset)
                content = stream.read(_CHUNK)
        except FileNotFoundError:
            size, content = 0, b""
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error}") from error
        if size < self.offset:
            raise StoreError(
                f"{self._path}: expected at least {self.offset} bytes, which were read before, found {size}. It was "
                "altered, or its machine lost power: start both sides again"
            )
        whole = content.rfind(b"\n") + 1
        if not whole and len(content) == _CHUNK:
            raise StoreError(f"{self._path}: a line of more than {_CHUNK:,} bytes. This is no reference channel")
        self._lines.extend(content[:whole].split(b"\n")[:-1])
        self.offset += whole
        return bool(whole)


class RefReader:
    """Reads references in the order in which they were published, from the first one on.

    A context manager: leaving the block tells the writer that no more is needed, or the failure that left it.

    Raises:
        StoreError: the channel has a consumer, is of another version, or its folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        codec: RefCodec,
        idle_timeout_s: float,
        session: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._codec = codec
        self._idle_timeout_s = idle_timeout_s
        self._session = session
        self._clock = clock
        self._lines = LineFile(folder / REFS, codec)
        self._checked = False
        self._ended = False
        self._read = 0
        self._consumed = InFlight()
        self._idle_since: float | None = None
        self._lock = SideLock(folder, "consumer")
        try:
            remove_end(folder, "consumer")
            write_consumed(folder, self._consumed)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        end_side(self, error)

    @property
    def has_ended(self) -> bool:
        """Whether the writer ended the stream and all of it was read."""
        return self._ended

    def poll(self, limit: int = POLL_REFS, wait_s: float | None = 0.0) -> list[SampleRef]:
        """Return the next references, at most `limit`; none if none came within `wait_s` seconds or the stream has ended.

        Args:
            wait_s: None waits until references come or the stream ends, up to the idle timeout.

        Raises:
            StoreError: the writer failed; a line is damaged; or nothing was published or consumed within the idle
                timeout, counted over all polls that wait.
        """
        until = None if wait_s is None else self._clock() + wait_s
        while True:
            refs = self._look(limit)
            if refs or self._ended or (until is not None and self._clock() >= until):
                return refs
            self.pause()

    def pause(self) -> None:
        """Sleep for a moment before the next poll, as part of one wait.

        Raises:
            StoreError: the idle timeout has passed since the first pause after references came or were consumed.
        """
        now = self._clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        if now - self._idle_since >= self._idle_timeout_s:
            raise StoreError(
                f"no reference came through channel {self._folder} for {self._idle_timeout_s:g} s, after {self._read} "
                f"before: {describe_sides(self._folder)}. Look at the writer's log, or raise the idle timeout"
            )
        time.sleep(min(POLL_S, self._idle_timeout_s / 4))

    def mark_consumed(self, consumed: InFlight) -> None:
        """Add to what the writer counts as consumed."""
        self._consumed += consumed
        self._idle_since = None
        write_consumed(self._folder, self._consumed)

    def close(self) -> None:
        """Tell the writer that no more references are needed, and give up the consumer's side."""
        self._end(EndMarker(False, session=self._session))

    def fail(self, reason: str) -> None:
        """Tell the writer that the consumer failed, and why; give up the consumer's side."""
        self._end(EndMarker(True, reason, session=self._session))

    def release(self) -> None:
        """Give up the consumer's side without a word to the writer, as the end of the process does."""
        self._lock.release()

    def _end(self, marker: EndMarker) -> None:
        if self._lock.is_held:
            write_end(self._folder, "consumer", marker)
        self._lock.release()

    def _look(self, limit: int) -> list[SampleRef]:
        """Read what there is. The end marker is read first: lines that are read after it are all that it counts."""
        self._checked = self._checked or has_header(self._folder, self._codec.name)
        if not self._checked:
            return []
        end = read_end(self._folder, "writer")
        if end is not None and end.failed and end.session == self._session:
            raise StoreError(f"the writer of reference channel {self._folder} failed: {end.reason}")
        refs = self._lines.read(limit)
        self._read += len(refs)
        if refs:
            self._idle_since = None
        if end is not None and not end.failed:
            if self._read > end.samples:
                raise StoreError(
                    f"reference channel {self._folder}: expected {end.samples} references in the ended stream, found more. "
                    "It was altered: use a new channel"
                )
            self._ended = self._read == end.samples
        return refs
