"""The files of a registry data set, and their identity. Torch-free; no file is parsed."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from draftworks.config.registry_files import DatasetSpec
from draftworks.errors import DataError
from draftworks.storage.identity import FileDigests, digest

SUFFIXES = (".jsonl", ".json", ".parquet")


def find_files(patterns: Sequence[str], root: Path) -> list[Path]:
    """Return the files of all globs relative to `root`, each once, sorted within a glob.

    Raises:
        DataError: a pattern matches no file, or a file of an unknown kind.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = sorted(Path(name) for name in glob.glob(os.path.join(root, pattern), recursive=True))
        files = [path for path in matches if path.is_file()]
        if not files:
            raise DataError(
                f"{pattern!r} matches no file below {root}: put one there, or correct `files` of the data set"
            )
        for path in files:
            if path.suffix.lower() not in SUFFIXES:
                raise DataError(f"{path}: expected one of {', '.join(SUFFIXES)}, found {path.suffix or 'no suffix'!r}")
            found[path] = None
    return list(found)


def digest_dataset(spec: DatasetSpec, root: Path, digests: FileDigests) -> str:
    """Return the digest of the files' contents and of how they are read; names and places do not matter."""
    return digest([spec.format, sorted(digests.of_file(path) for path in find_files(spec.files, root))])
