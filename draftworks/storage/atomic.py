"""Files that are complete or absent: written aside, fsynced, renamed. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from draftworks.errors import StoreError


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """A staging path beside `path` that becomes `path` when the block ends; on an error it is removed instead."""
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
def published_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` that takes its place when the block ends; on an error it is removed instead.

    What an interrupted attempt left is removed by the next. At most one process at a time may publish a path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging, old = path.with_name(f".{path.name}.staging"), path.with_name(f".{path.name}.replaced")
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        fsync_tree(staging)
        if path.exists():
            os.replace(path, old)
        os.replace(staging, path)
        fsync(path.parent)
    finally:
        for leftover in (staging, old):
            shutil.rmtree(leftover, ignore_errors=True)


def publish_json(path: Path, value: Any) -> None:
    """Write a JSON document a person can read, atomically."""
    with published(path) as staging:
        staging.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, and itself, to the disk."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk: without the latter a rename may not survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


STAGED, ASIDE = "tmp", "old"

T = TypeVar("T")


class NoFolder(Exception):
    """There is no such folder, or none any more."""


def undisturbed(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of a folder. If it was replaced or removed meanwhile, `read` is called again.

    Raises:
        NoFolder: there is none.
        StoreError: it cannot be opened.
    """
    while True:
        try:
            opened = os.open(folder, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            raise NoFolder(folder) from None
        except OSError as error:
            raise StoreError(f"{folder} cannot be opened: {error}. Correct its permissions") from error
        try:
            result = read(folder)
            if _is_still(folder, opened):
                return result
        except Exception:
            if _is_still(folder, opened):
                raise
        finally:
            os.close(opened)


def _is_still(folder: Path, opened: int) -> bool:
    """While it is open, no other folder can get the same inode."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(opened))
    except OSError:
        return False


def staging_of(final: Path) -> Path:
    """A name for a new folder beside `final`, used by nobody else."""
    return _beside(final, STAGED)


def publish_folder(staging: Path, final: Path, replace: bool) -> bool:
    """`staging` becomes `final`; False if `final` was published by somebody else first.

    Args:
        replace: move aside what is in `final`.
    """
    aside = move_aside(final) if replace else None
    try:
        os.rename(staging, final)
        fsync(final.parent)
    except OSError:
        if not final.exists():
            raise
        return False
    finally:
        if aside is not None:
            remove(aside)
    return True


def move_aside(final: Path) -> Path | None:
    """Take `final` out of the readers' sight by one rename; None if there is none."""
    aside = _beside(final, ASIDE)
    try:
        os.rename(final, aside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    fsync(final.parent)
    return aside


def sweep(final: Path) -> None:
    """Remove what crashed processes left of `final`. Nobody else may be working on it."""
    for kind in (STAGED, ASIDE):
        for leftover in final.parent.glob(f"{final.name}.{kind}-*"):
            remove(leftover)


def remove(path: Path) -> None:
    """Remove a folder or file that others may be removing as well."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _beside(final: Path, kind: str) -> Path:
    return final.with_name(f"{final.name}.{kind}-{uuid4().hex[:8]}")
