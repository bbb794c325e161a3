"""Data sets whose files grow: their lines, each once, and the first lines of all as a set of their own. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from pathlib import Path

from draftworks.config.registry_files import DatasetSpec
from draftworks.data.sources import SERVED, find_dataset_files
from draftworks.errors import ConfigError, DataError
from draftworks.storage.files import open_regular, publish_file
from draftworks.storage.words import list_names

MAX_LINE_BYTES = 64 * 1024 * 1024
LINES = (".jsonl", ".json")
SOURCES = "draftworks.sources"
"""Group of entry points: functions without arguments that return an iterator of rows in ShareGPT or OpenAI form."""
HEAD_FILE = "head.jsonl"
COUNTED_LINES = 1024


@dataclass(frozen=True)
class Line:
    """A line of a file that is not empty; `number` counts from 1."""

    file: str
    number: int
    content: bytes


class GrowingFiles:
    """The lines of a data set's files in the order of their names; a line counts once its end is written.

    Args:
        root: the registry's folder, which the globs are relative to.
        state: of an earlier reader, which this one continues.
        to_end: take the last line of a file without its end, too, since nothing more comes.

    Raises:
        DataError: no file, one that is not of lines, or one that has become shorter.
    """

    def __init__(
        self, spec: DatasetSpec, root: Path, state: Mapping[str, list[int]] | None = None, to_end: bool = False
    ) -> None:
        if spec.format == "tokens":
            raise DataError(
                f"data set {spec.name}: rows that are tokenized already cannot be read as they come: give conversations, or "
                "streaming.order: planned"
            )
        self.state = {file: list(place) for file, place in (state or {}).items()}
        self._spec = spec
        self._root = root
        self._to_end = to_end

    def read(self, count: int) -> list[Line]:
        """Return the next lines, at most `count`; none if none are whole yet."""
        found: list[Line] = []
        for path in find_dataset_files(self._spec, self._root):
            found += islice(self._read_file(path), count - len(found))
            if len(found) == count:
                break
        return found

    def _read_file(self, path: Path) -> Iterator[Line]:
        offset, number = self.state.get(str(path), (0, 0))
        if self._spec.format != SERVED and path.suffix.lower() not in LINES:
            raise DataError(f"{path}: expected JSONL, which can grow, found {path.suffix or 'no suffix'!r}")
        try:
            if path.stat().st_size < offset:
                raise DataError(f"{path}: is shorter than before: expected a file that only grows")
            with open_regular(path) as stream:
                if not offset and stream.read(1) == b"[" and self._spec.format != SERVED:
                    raise DataError(f"{path}: expected one object per line, which can grow, found a list")
                stream.seek(offset)
                while raw := stream.readline(MAX_LINE_BYTES):
                    if not raw.endswith(b"\n"):
                        if len(raw) == MAX_LINE_BYTES:
                            raise DataError(f"{path}:{number + 1}: a line longer than {MAX_LINE_BYTES:,} bytes")
                        if not self._to_end:
                            return
                    offset, number = offset + len(raw), number + 1
                    self.state[str(path)] = [offset, number]
                    if raw.strip():
                        yield Line(str(path), number, raw)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error


def read_head(spec: DatasetSpec, root: Path, rows: int) -> list[Line]:
    """Return the first lines of a data set's files. Raises DataError if there are fewer yet, or as `GrowingFiles`."""
    lines = GrowingFiles(spec, root).read(rows)
    if len(lines) < rows:
        raise DataError(
            f"data set {spec.name}: expected the first {rows:,} rows, from which a training in arrival order has its draft "
            f"vocabulary and its held-out part, found {len(lines):,}: wait for more, or lower streaming.vocabulary_samples"
        )
    return lines


def digest_head(spec: DatasetSpec, root: Path, rows: int) -> str:
    """Return the digest of the first lines, which stays while the files grow. Raises DataError as `read_head`."""
    content = hashlib.sha256()
    for line in read_head(spec, root, rows):
        content.update(line.content)
    return content.hexdigest()


def write_head(spec: DatasetSpec, root: Path, rows: int, out: Path) -> DatasetSpec:
    """Write the first lines into `out`; return them as a data set. Raises DataError as `read_head`."""
    with publish_file(out / HEAD_FILE) as staging:
        staging.write_bytes(b"".join(line.content for line in read_head(spec, root, rows)))
    return spec.model_copy(update={"files": [str(out / HEAD_FILE)]})


def count_lines(spec: DatasetSpec, root: Path) -> int:
    """Return the lines of a data set's files that are not empty, without holding them. Raises DataError as `GrowingFiles`."""
    reader, total = GrowingFiles(spec, root), 0
    while lines := reader.read(COUNTED_LINES):
        total += len(lines)
    return total


def find_source(name: str) -> EntryPoint:
    """Return the entry point of an iterator. Raises ConfigError if no installed package has it."""
    known = {each.name: each for each in entry_points(group=SOURCES)}
    if name not in known:
        raise ConfigError(
            f"streaming.source: expected an entry point of the group {SOURCES}, found {name!r}; installed: {list_names(known)}"
        )
    return known[name]
