"""The files behind a registry data set, and their identity. Torch-free."""

from __future__ import annotations

from pathlib import Path

from draftworks.errors import DataError
from draftworks.identity import FileDigests, digest
from draftworks.registry import Registry
from draftworks.specs import DatasetSpec


def dataset_files(spec: DatasetSpec, registry: Registry) -> list[Path]:
    """All files of a data set, sorted.

    Raises:
        DataError: a pattern that matches no file.
    """
    found: set[Path] = set()
    for pattern in spec.files:
        matches = _matches(pattern, registry)
        if not matches:
            raise DataError(
                f"dataset {spec.name}: {pattern!r} matches no file below {registry.root}. "
                f"Put the file there, or correct `files` in {registry.root / 'datasets' / spec.name}.yaml"
            )
        found.update(matches)
    return sorted(found)


def _matches(pattern: str, registry: Registry) -> list[Path]:
    located = registry.located(pattern)
    parts = located.parts
    magic = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    if magic is None:
        return [located] if located.is_file() else []
    return [path for path in Path(*parts[:magic]).glob(str(Path(*parts[magic:]))) if path.is_file()]


def dataset_version(spec: DatasetSpec, files: list[Path], digests: FileDigests) -> str:
    """Digest of the content of the files and how they are read; their names and places do not matter."""
    return digest([spec.format, sorted(digests.of_file(path) for path in files)])
