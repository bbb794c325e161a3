"""Files written, replaced and read whole or not at all; full disks; what differs between two nested mappings."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from draftworks.errors import StoreError


@contextmanager
def publish_file(path: Path, staging: Path | None = None) -> Iterator[Path]:
    """Yield a staging path that is renamed to `path` when the block ends, and removed if the block raises.

    Args:
        staging: a path on the same file system, for a `path` whose folder exists; by default beside `path`, whose folder is
            created if it is missing.
    """
    if staging is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield staging
        fsync(staging)
        os.replace(staging, path)
        fsync(path.parent)
    finally:
        staging.unlink(missing_ok=True)


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` that replaces `path` when the block ends, and is removed if the block raises.

    The next call removes the folders of an interrupted one. Only one process at a time may publish a path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging, aside = path.with_name(f".{path.name}.staging"), path.with_name(f".{path.name}.replaced")
    remove(staging)
    staging.mkdir()
    try:
        yield staging
        replace_folder(staging, path, aside)
    finally:
        remove(staging)


def replace_folder(staging: Path, final: Path, aside: Path | None, confirm: Callable[[], None] = lambda: None) -> None:
    """Rename `staging` to `final` after an fsync; the old folder stays complete until it has been renamed to `aside`.

    If the process is killed at any point, `final` is the old folder, the new one or absent, and the rest is under `staging`
    and `aside`.

    Args:
        aside: a name that no reader opens, for the old folder until it is removed; None if nothing may be replaced.
        confirm: called between fsync and renames; an error of it leaves everything as it is.

    Raises:
        OSError: the rename failed. The old folder is back in place, unless another process has published `final` meanwhile,
            whose folder is kept.
    """
    fsync_tree(staging)
    confirm()
    if aside is not None and not move_aside(final, aside):
        aside = None  # there was nothing to replace
    try:
        os.replace(staging, final)
    except OSError:
        if aside is not None:
            remove(aside) if final.exists() else os.rename(aside, final)
        raise
    fsync(final.parent)
    if aside is not None:
        remove(aside)


def publish_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    with publish_file(path) as staging:
        staging.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def cache_json(path: Path, value: Any) -> None:
    """Write a value as `publish_json`; where nothing can be written, it is computed again next time."""
    with suppress(OSError):
        publish_json(path, value)


def fsync_tree(folder: Path) -> None:
    """Flush `folder` and every file and folder in it to the disk."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk. A rename survives a power cut only if its folder is flushed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


STAGED, ASIDE = "tmp", "old"

T = TypeVar("T")


class FolderMissing(Exception):
    """The folder does not exist, or was removed while it was read."""


def read_undisturbed(folder: Path, read: Callable[[Path], T]) -> T:
    """Return `read(folder)`, called again whenever the folder was replaced or removed during the call.

    Raises:
        FolderMissing: the folder does not exist.
        StoreError: the folder cannot be opened.
    """
    while True:
        try:
            opened = os.open(folder, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            raise FolderMissing(folder) from None
        except OSError as error:
            raise StoreError(f"{folder} cannot be opened: {error}. Correct its permissions") from error
        try:
            result = read(folder)
            if _is_same_folder(folder, opened):
                return result
        except Exception:
            if _is_same_folder(folder, opened):
                raise
        finally:
            os.close(opened)


def _is_same_folder(folder: Path, opened: int) -> bool:
    """Return whether the path still names the opened folder. An open folder's inode is not given to another one."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(opened))
    except OSError:
        return False


def make_sibling_path(final: Path, kind: str) -> Path:
    """Return a unique path beside `final`; `kind` is `STAGED` or `ASIDE`."""
    return final.with_name(f"{final.name}.{kind}-{uuid4().hex[:8]}")


def move_aside(final: Path, aside: Path) -> bool:
    """Rename `final` to `aside`, so that readers no longer find it; return False if `final` does not exist."""
    remove(aside)
    try:
        os.replace(final, aside)
    except (FileNotFoundError, NotADirectoryError):
        return False
    fsync(final.parent)
    return True


def sweep(final: Path) -> None:
    """Remove the folders that crashed processes left beside `final`. No other process may be writing it."""
    for kind in (STAGED, ASIDE):
        for leftover in final.parent.glob(f"{final.name}.{kind}-*"):
            remove(leftover)


def remove(path: Path) -> None:
    """Remove a folder or file; no error if another process removes it at the same time."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_WORDS = ("No space left on device", "Disk quota exceeded")


def explain_full_disk(error: BaseException, folder: Path) -> StoreError | None:
    """Return a StoreError for the user if `error` was caused by a full disk or quota; None for any other error.

    Args:
        folder: the output folder, named if the error does not contain a file name.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if getattr(cause, "errno", None) in _ERRNOS or any(words in str(cause) for words in _WORDS):
            place = Path(getattr(cause, "filename", None) or folder)
            return StoreError(
                f"{place}: the disk is full, or a quota is used up{_format_free_space(place)}. Make room and run it again:"
                " finished work is kept, half-written files are not"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _format_free_space(place: Path) -> str:
    """Return the free space around `place` as text; empty if it cannot be read."""
    for folder in (place, *place.absolute().parents):
        try:
            return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free in {folder})"
        except OSError:
            continue
    return ""


ABSENT = "nothing"


def describe_changes(
    expected: Mapping[str, Any], found: Mapping[str, Any], wording: str = "{name}: expected {expected}, found {found}"
) -> list[str]:
    """Return a text for each value that differs, sorted by name; nested names are joined as `outer.inner`."""
    ours, theirs = _flatten(expected), _flatten(found)
    return [
        wording.format(name=name, expected=ours.get(name, ABSENT), found=theirs.get(name, ABSENT))
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"training.lr": 0.1}` for `{"training": {"lr": 0.1}}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
