"""Atomic replacement of files and folders: written under another name, fsynced, renamed. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
