"""Checkpoints as folders: names, completeness, checksums and pointers. No tensors, no processes.

OUTPUT_DIR/RUN-step120/            model.safetensors  optimizer/  rng/  history.json  checkpoint.json
OUTPUT_DIR/RUN-step120.partial/    being written, or left by a process that died; never read
OUTPUT_DIR/RUN-latest.json         name of the newest checkpoint; relative, so the folder can be copied
OUTPUT_DIR/RUN-best.json           name and score of the best checkpoint
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from draftworks.errors import ConfigError, StoreError
from draftworks.storage.artifacts import FileManifest, FileRecord
from draftworks.storage.files import fsync, open_regular, publish_json, read_json, replace_folder
from draftworks.storage.identity import digest
from draftworks.storage.names import require_name

SCHEMA_VERSION = 1
RECORD = "checkpoint.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointRecord:
    """Content of checkpoint.json. It is written last: a folder without it is not a checkpoint.

    Attributes:
        state: counters, data position and identities, as JSON.
        files: every other file of the checkpoint, by path inside it.
    """

    run_id: str
    step: int
    world_size: int
    created: float
    state: dict[str, Any]
    files: Mapping[str, FileRecord]

    @property
    def bytes(self) -> int:
        return sum(file.bytes or 0 for file in self.files.values())

    @property
    def manifest(self) -> FileManifest:
        return FileManifest(self.files, checksum)


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run in a folder that other runs may share.

    Raises:
        ConfigError: `run_id` could be taken for a path or a pattern.
    """

    output_dir: Path
    run_id: str

    def __post_init__(self) -> None:
        try:
            require_name(self.run_id)
        except ValueError as error:
            raise ConfigError(f"run_id: {error}") from error

    def final(self, step: int) -> Path:
        return self.output_dir / f"{self.run_id}-step{step}"

    def staging(self, step: int) -> Path:
        return self.output_dir / f"{self.run_id}-step{step}.partial"

    @property
    def latest_pointer(self) -> Path:
        return self.output_dir / f"{self.run_id}-latest.json"

    @property
    def best_pointer(self) -> Path:
        return self.output_dir / f"{self.run_id}-best.json"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return sorted(step for step, path in self._matching(r"") if is_complete(path))

    def holds(self, checkpoint: Path, step: int) -> bool:
        """Whether `checkpoint` is this run's own checkpoint of `step`, not another run's or a copy elsewhere."""
        return checkpoint.resolve() == self.final(step).resolve()

    def publish(self, step: int) -> None:
        """Rename `staging(step)` to `final(step)`; an existing checkpoint stays whole until it is renamed away."""
        # Named `.partial` too: what a crash leaves here is swept and never read.
        aside = self.output_dir / f"{self.run_id}-step{step}.old.partial"
        replace_folder(self.staging(step), self.final(step), aside)

    def remove(self, step: int) -> None:
        """Delete a checkpoint; a reader never sees a part of it.

        Raises:
            OSError: it cannot be deleted. If the folder could be renamed, what is left is no longer a checkpoint.
        """
        staging = self.staging(step)
        shutil.rmtree(staging, ignore_errors=True)
        os.replace(self.final(step), staging)
        shutil.rmtree(staging)

    def sweep(self) -> None:
        """Remove staging folders of writers that died."""
        for _, path in self._matching(r"(?:\.old)?\.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def point_to(self, pointer: Path, step: int, **more: Any) -> None:
        """Write a pointer file that names the checkpoint of `step`."""
        publish_json(pointer, {"run_id": self.run_id, "step": step, "checkpoint": self.final(step).name, **more})

    def _matching(self, suffix: str) -> list[tuple[int, Path]]:
        if not self.output_dir.is_dir():
            return []
        pattern = re.compile(rf"{re.escape(self.run_id)}-step(\d+){suffix}")
        named = ((pattern.fullmatch(path.name), path) for path in self.output_dir.iterdir())
        return [(int(match[1]), path) for match, path in named if match]


def checksum(path: Path) -> str:
    """Return XXH3 of a file's bytes. It finds damage at memory speed; it is neither an identity nor secure."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with open_regular(path) as stream:
        while read := stream.readinto(buffer):
            state.update(buffer[:read])
    return state.hexdigest()


def sync_and_checksum(folder: Path, names: Sequence[str]) -> Mapping[str, FileRecord]:
    """Flush files to disk while reading them; return their sizes and checksums by name."""
    with ThreadPoolExecutor(4, thread_name_prefix="sync") as pool:
        synced = [pool.submit(fsync, folder / name) for name in names]
        found = FileManifest.record(folder, names, checksum)
        for each in synced:
            each.result()
    return found.files


def write_record(
    folder: Path,
    run_id: str,
    step: int,
    world_size: int,
    created: float,
    state: Mapping[str, Any],
    files: Mapping[str, FileRecord],
) -> None:
    """Write the record that makes `folder` a checkpoint. `files`: by path inside it."""
    record = CheckpointRecord(run_id, step, world_size, created, dict(state), files)
    stored = {name: {"bytes": file.bytes, "checksum": file.digest} for name, file in sorted(files.items())}
    values = {"schema_version": SCHEMA_VERSION, **asdict(record), "files": stored}
    document = json.loads(json.dumps(values))  # as it is read back
    publish_json(folder / RECORD, {**document, "digest": digest(document)})


def read_record(folder: Path) -> CheckpointRecord:
    """Return the record of a checkpoint, after checking that its files exist with their sizes; contents are not read.

    Raises:
        StoreError: not a checkpoint, or not a complete one.
    """
    path = folder / RECORD
    if not folder.is_dir():
        raise StoreError(
            f"{folder}: expected the folder of a checkpoint, found {'a file' if folder.exists() else 'nothing'}"
        )
    try:
        values = read_json(path)
        recorded = values.pop("digest")
        altered, schema = recorded != digest(values), values.pop("schema_version")
        stored = values.pop("files").items()
        files = {name: FileRecord(bytes=file["bytes"], digest=file["checksum"]) for name, file in stored}
        record = CheckpointRecord(files=files, **values)
    except FileNotFoundError:
        raise StoreError(f"{folder}: not a complete checkpoint: {RECORD} is missing{_hint(folder)}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: not a checkpoint record ({error})") from error
    if schema != SCHEMA_VERSION:
        raise StoreError(f"{path}: schema {schema}, expected {SCHEMA_VERSION}")
    if altered:
        raise StoreError(f"{path}: altered: its digest differs from the recorded {recorded}")
    damage = record.manifest.find_damage(folder, read=False)
    if damage is not None:
        raise StoreError(damage)
    return record


def verify(folder: Path, record: CheckpointRecord, names: Iterable[str]) -> None:
    """Read files of a checkpoint and compare their checksums with the record.

    Raises:
        StoreError: a file is altered; the message names it.
    """
    record.manifest.require_intact(folder, f"Remove {folder} to go on from an older checkpoint", names)


def is_complete(folder: Path) -> bool:
    try:
        read_record(folder)
    except StoreError:
        return False
    return True


def _hint(folder: Path) -> str:
    inside = sorted(path.name for path in folder.iterdir() if (path / RECORD).is_file() and is_complete(path))
    return f". It holds the checkpoints {', '.join(inside)}: name one of them" if inside else ""
