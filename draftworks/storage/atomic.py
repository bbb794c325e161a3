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
def publish_file(path: Path, staging: Path | None = None) -> Iterator[Path]:
    """A staging path that becomes `path` when the block ends; on an error it is removed instead.

    Args:
        staging: on the same file system, where the folder of `path` exists; default beside `path`, in a folder made on demand.
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
    """An empty folder beside `path` that takes its place when the block ends; on an error it is removed instead.

    What an interrupted attempt left is removed by the next. At most one process at a time may publish a path.
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


def replace_folder(staging: Path, final: Path, aside: Path | None) -> None:
    """`staging` becomes `final`, flushed to the disk; what was there is whole until it is out of the way.

    A process killed at any point leaves the old folder, the new one or none as `final`, and the rest as `staging` and `aside`.

    Args:
        aside: a name that no reader looks at, for the old folder on its way out; None replaces nothing.

    Raises:
        OSError: nothing has changed, unless somebody else has published `final` meanwhile, who is left alone.
    """
    fsync_tree(staging)
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
    """Write a JSON document a person can read, atomically."""
    with publish_file(path) as staging:
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


class FolderMissing(Exception):
    """There is no such folder, or none any more."""


def read_undisturbed(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of a folder. If it was replaced or removed meanwhile, `read` is called again.

    Raises:
        FolderMissing: there is none.
        StoreError: it cannot be opened.
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
    """While it is open, no other folder can get the same inode."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(opened))
    except OSError:
        return False


def make_sibling_path(final: Path, kind: str) -> Path:
    """A name for a folder beside `final`, used by nobody else; `kind` is `STAGED` or `ASIDE`."""
    return final.with_name(f"{final.name}.{kind}-{uuid4().hex[:8]}")


def move_aside(final: Path, aside: Path) -> bool:
    """Take `final` out of the readers' sight by one rename; False if there is none."""
    remove(aside)
    try:
        os.replace(final, aside)
    except (FileNotFoundError, NotADirectoryError):
        return False
    fsync(final.parent)
    return True


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
