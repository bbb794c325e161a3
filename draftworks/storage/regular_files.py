"""Reading files that somebody else may have put there: regular ones only, of bounded size; JSON of bounded depth.

What is wrong is an OSError or a ValueError, so that the reader of a kind of file, who knows what it is for and what to
do, names it in one way whatever is wrong. Standard library only.
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
"""Of a safetensors file, as the library has it."""
MAX_JSON_DEPTH = 100
"""More than anybody nests, and less than breaks what walks through it afterwards."""

_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder", stat.S_IFCHR: "device"}


def open_regular(path: Path) -> BufferedReader:
    """The file, opened to read bytes. Does not wait for a writer as opening a pipe would.

    Raises:
        OSError: it cannot be opened, or is a pipe, socket, device or folder.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def require_regular(found: os.stat_result, path: Path) -> None:
    """OSError for what is no regular file: of the same kind as the system's own, so that nothing else has to be caught."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "device")
        raise OSError(errno.EINVAL, f"expected a file, found a {kind}", str(path))


def require_file(path: Path) -> Path:
    """The path, for libraries that open it themselves. Raises OSError as `open_regular`."""
    require_regular(path.stat(), path)
    return path


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """A file's bytes. Raises OSError as `open_regular`, and ValueError for more than `most_bytes`."""
    with open_regular(path) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"larger than {most_bytes:,} bytes")
    return content


def read_json(path: Path, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: not a regular file, or one that cannot be read.
        ValueError: larger than `most_bytes`, not UTF-8, not JSON, or nested deeper than `MAX_JSON_DEPTH`.
    """
    return parse_json(read_bytes(path, most_bytes))


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError if it is none, or nested deeper than `MAX_JSON_DEPTH`."""
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
