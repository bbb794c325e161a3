"""Files that are complete or absent: written aside, fsynced, renamed. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
