"""Bounded reading of untrusted files: regular files only, limited in size; JSON limited in depth. Standard library only.

Every problem is an OSError or a ValueError, so that the caller, who knows the purpose of the file and the remedy, can
report all of them in one way.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000
"""Limit for a safetensors header, the same as in the safetensors library."""
MAX_JSON_DEPTH = 100
"""Deeper than any real file, and shallow enough for recursive code that processes the value."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_SPARE_BYTES = 4096
"""Asked for beyond a file's size: it may have grown, or be one whose size is not known."""
_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder", stat.S_IFCHR: "device"}


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading bytes; does not block on a pipe without a writer.

    Raises:
        OSError: it cannot be opened, or is a pipe, socket, device or folder.
    """
    handle = os.open(path, _FLAGS)
    try:
        require_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def require_regular(found: os.stat_result, path: str | Path) -> None:
    """Raise OSError if `found` is not a regular file; the same type as system errors, so that callers catch one type."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "device")
        raise OSError(errno.EINVAL, f"expected a file, found a {kind}", str(path))


def require_file(path: Path) -> Path:
    """Return `path` if it is a regular file, for libraries that open it themselves. Raises OSError as `open_regular`."""
    require_regular(path.stat(), path)
    return path


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Raises OSError as `open_regular`, and ValueError for more than `max_bytes`."""
    handle = os.open(path, _FLAGS)  # without a buffer, which costs more than a small file
    try:
        found = os.fstat(handle)
        require_regular(found, path)
        pieces, left = [], max_bytes + 1
        while left and (piece := os.read(handle, min(left, found.st_size + _SPARE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(handle)
    if not left:
        raise ValueError(f"larger than {max_bytes:,} bytes")
    return b"".join(pieces)


def read_json(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: not a regular file, or one that cannot be read.
        ValueError: larger than `max_bytes`, not UTF-8, not JSON, or nested deeper than `MAX_JSON_DEPTH`.
    """
    return parse_json(read_bytes(path, max_bytes))


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, or nested deeper than `MAX_JSON_DEPTH`."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"nested too deeply, over {MAX_JSON_DEPTH} levels") from None
    if _may_be_deep(content) and _depth_exceeds(value, MAX_JSON_DEPTH):
        raise ValueError(f"nested too deeply, over {MAX_JSON_DEPTH} levels")
    return value


def _may_be_deep(content: bytes | str) -> bool:
    text = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    return text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH


def _depth_exceeds(value: Any, most: int) -> bool:
    containers = [value]
    for _ in range(most):
        inner = (each for outer in containers for each in (outer.values() if isinstance(outer, dict) else outer))
        containers = [each for each in inner if isinstance(each, (dict, list))]
    return bool(containers)
