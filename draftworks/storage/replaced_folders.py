"""Folders that are replaced as a whole while others read them: written aside, renamed in, moved aside, removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from draftworks.errors import StoreError
from draftworks.storage.atomic import fsync

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
