"""What is kept of an answer while it passes: its beginning and its end, from which the objects with the counts are read.

Nothing is parsed or decompressed while the answer passes. Engines say what they counted in the last objects of a stream, so
a long one is not held.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from typing import Any

from draftworks.storage.files import parse_json

HEAD_BYTES = 4 << 10
STREAM_BYTES = 1 << 20
"""Of a stream's end. An object of vLLM with two entries for each of 50,000 passes is smaller."""
WHOLE_BYTES = 8 << 20
"""Of an answer that has to be whole: an object, or anything compressed. Of a larger one nothing is read."""
_LAST_OBJECTS = 8
_ENCODINGS = {"": None, "identity": None, "gzip": zlib.MAX_WBITS | 32, "deflate": zlib.MAX_WBITS | 32}
_EVENTS = re.compile(rb"\r?\n\r?\n")
_THOUGHTS = re.compile(rb'"reasoning(?:_content)?"\s*:\s*"[^"]')


class AnswerPieces:
    """The beginning and the end of an answer's body.

    Args:
        streamed: whether it is a stream of events.
        encoding: value of Content-Encoding; what is encoded otherwise than by gzip or deflate is not read.
    """

    def __init__(self, streamed: bool, encoding: str = "") -> None:
        self.total = 0
        self._streamed = streamed
        self._encoding = encoding.strip().lower()
        self._limit = STREAM_BYTES if streamed and _ENCODINGS.get(self._encoding, 0) is None else WHOLE_BYTES
        self._head = b""
        self._pieces: deque[bytes] = deque()
        self._kept = 0

    @property
    def nbytes(self) -> int:
        return self._kept + len(self._head)

    def add(self, piece: bytes) -> None:
        """Take the next piece of the body, of any length."""
        self.total += len(piece)
        if len(self._head) < HEAD_BYTES:
            self._head += piece[: HEAD_BYTES - len(self._head)]
        self._pieces.append(piece)
        self._kept += len(piece)
        while self._kept > self._limit and len(self._pieces) > 1:
            self._kept -= len(self._pieces.popleft())

    def read_objects(self) -> list[dict[str, Any]]:
        """Return the answer as an object, or the last objects of a stream in their order; none of what cannot be read."""
        body = self._decode(b"".join(self._pieces))
        if not self._streamed:
            return _parse_objects(body) if self._kept == self.total else []
        events = _EVENTS.split(body)
        whole = events if self._kept == self.total else events[1:]  # the first one has lost its beginning
        datas = [data for event in whole[-_LAST_OBJECTS - 2 :] if (data := _find_data(event)).startswith(b"{")]
        return [each for data in datas[-_LAST_OBJECTS:] for each in _parse_objects(data)]

    @property
    def has_thoughts(self) -> bool:
        """Whether the beginning of the answer is, or has, thoughts under a name of their own."""
        return _THOUGHTS.search(self._decode(self._head)) is not None

    def _decode(self, body: bytes) -> bytes:
        """Return a body as it was before it was encoded; empty where that is not known, or not possible."""
        bits = _ENCODINGS.get(self._encoding, 0)
        if bits is None:
            return body
        if not bits:
            return b""
        try:
            return zlib.decompressobj(bits).decompress(body, 2 * WHOLE_BYTES)
        except zlib.error:
            return b""


def _find_data(event: bytes) -> bytes:
    """Return the data of a server-sent event."""
    lines = (line.rstrip(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def _parse_objects(data: bytes) -> list[dict[str, Any]]:
    """Return the objects of a text: one, or those of a list."""
    try:
        found = parse_json(data)
    except ValueError:
        return []
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, dict)]
