"""The files of a registry data set, and their identity. Torch-free; no file is parsed."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from draftworks.config.dataset_urls import is_url
from draftworks.config.registry_files import DatasetSpec
from draftworks.config.served import ServedSpec
from draftworks.data.served.hook_identity import digest_hook
from draftworks.data.served.secrets import REVISION
from draftworks.errors import DataError
from draftworks.storage.identity import FileDigests, digest

ROWS_REVISION = 3
"""Increased when the same rows become other conversations: 3 reads prompts without answers, `system`, `attention_mask`, thoughts
kept apart and which turns are learnt."""
SERVED = "served"
"""The format of data sets of served prompts."""
SUFFIXES = (".jsonl", ".json", ".parquet")


def find_dataset_files(spec: DatasetSpec, root: Path) -> list[Path]:
    """Return the files of a data set. Logs of served prompts may have any suffix; otherwise as `find_files`."""
    return find_files(spec.files, root, any_suffix=spec.format == SERVED)


def find_files(patterns: Sequence[str], root: Path, any_suffix: bool = False) -> list[Path]:
    """Return the files of all globs relative to `root` and of all URLs, each once, sorted within a glob.

    What exists under a name with `*`, `?` or brackets is meant literally; nothing in the name of `root` is a pattern.

    Files of `s3://` and `hf://` are downloaded unless they were before, see `remote_files`.

    Raises:
        DataError: a pattern matches no file, or a file of an unknown kind.
        DraftworksError: files cannot be downloaded.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if is_url(pattern):
            from draftworks.data.remote_files import fetch_files  # its libraries are loaded for such data only

            fetched = fetch_files(pattern, root)
            found |= dict.fromkeys(fetched if any_suffix else _require_known_kinds(fetched))
            continue
        files = [path for path in _match(pattern, root) if path.is_file()]
        if not files:
            raise DataError(
                f"{pattern!r} matches no file below {root}: put one there, or correct `files` of the data set"
            )
        found |= dict.fromkeys(files if any_suffix else _require_known_kinds(files))
    return list(found)


def _match(pattern: str, root: Path) -> list[Path]:
    """Return what a glob matches, sorted. Where its brackets match nothing, they are those of a name."""
    literal = _escape_existing(pattern, root)
    names = glob.glob(literal, root_dir=root, recursive=True)
    if not names and "[" in literal:
        names = glob.glob(literal.replace("[[]", "[").replace("[", "[[]"), root_dir=root, recursive=True)
    return sorted(root / name for name in names)


def _escape_existing(pattern: str, root: Path) -> str:
    """Return the pattern in which the longest first part that exists under just this name matches itself alone."""
    parts = Path(pattern).parts
    count = next((n for n in range(len(parts), 0, -1) if os.path.lexists(root.joinpath(*parts[:n]))), 0)
    return os.path.join("", *map(glob.escape, parts[:count]), *parts[count:])


def _require_known_kinds(files: list[Path]) -> list[Path]:
    for path in files:
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: expected one of {', '.join(SUFFIXES)}, found {path.suffix or 'no suffix'!r}")
    return files


def digest_dataset(spec: DatasetSpec, root: Path, digests: FileDigests) -> str:
    """Return the digest of the files' contents and of how they are read; names and places do not matter.

    Of served prompts the redaction counts too, and the name, which is a slice column's default.
    """
    contents = sorted(digests.of_file(path) for path in find_dataset_files(spec, root))
    if spec.format != SERVED:
        return digest([spec.format, contents, ROWS_REVISION])
    served = spec.served or ServedSpec()
    redaction = digest_hook(served.redaction, root, digests)
    return digest([spec.format, contents, spec.name, served.to_identity(), redaction, REVISION, ROWS_REVISION])
