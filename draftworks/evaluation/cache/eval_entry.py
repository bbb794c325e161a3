"""What an entry of the evaluation cache is on the disk: files, and a record of what they are and what made them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from draftworks.config.registry_files import describe
from draftworks.evaluation.cache.eval_config import EvalConfig
from draftworks.storage.identity import file_digest
from draftworks.storage.regular_files import MOST_JSON_BYTES, read_bytes

SCHEMA_VERSION = 1
META = "eval_cache_meta.json"


class FileRecord(BaseModel):
    """What a file was when it was written."""

    bytes: int
    digest: str


class EntryMeta(BaseModel):
    """The content of eval_cache_meta.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    key: str
    identity: tuple[str, ...]
    inputs: dict[str, str]
    files: dict[str, FileRecord]


def write_meta(folder: Path, config: EvalConfig, inputs: Mapping[str, str]) -> None:
    """Record the files in `folder`, and what they were made from."""
    files = {
        path.relative_to(folder).as_posix(): FileRecord(bytes=path.stat().st_size, digest=file_digest(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    meta = EntryMeta(key=config.cache_key, identity=config.identity_fields(), inputs=dict(inputs), files=files)
    (folder / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")


def problem_with(folder: Path, config: EvalConfig, inputs: Mapping[str, str] | None, verify: bool) -> str | None:
    """Why a folder is not a config's entry.

    Args:
        inputs: what it has to be made from; None for whatever.
        verify: compare digests, not only sizes.
    """
    path = folder / META
    try:
        meta = EntryMeta.model_validate_json(read_bytes(path, MOST_JSON_BYTES))
    except ValidationError as error:
        return describe(error, EntryMeta, str(path))
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    if (meta.key, meta.identity) != (config.cache_key, config.identity_fields()):
        return f"{path} is of another evaluation: expected {config.identity_fields()}, found {meta.identity}"
    damages = (_damage(folder / name, record, verify) for name, record in meta.files.items())
    damage = next(filter(None, damages), None)
    return damage if damage is not None or inputs is None else _changes(meta.inputs, inputs)


def _damage(path: Path, record: FileRecord, verify: bool) -> str | None:
    try:
        found = path.stat().st_size
        if found != record.bytes:
            return f"{path} is truncated or altered: expected {record.bytes} bytes, found {found}"
        if verify and (content := file_digest(path)) != record.digest:
            return f"{path} is altered: expected digest {record.digest}, found {content}"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return None


def _changes(recorded: Mapping[str, str], inputs: Mapping[str, str]) -> str | None:
    """The inputs that differ, from what to what."""
    changes = [
        f"{name} changed from {recorded.get(name, 'nothing')} to {inputs.get(name, 'nothing')}"
        for name in sorted(recorded.keys() | inputs.keys())
        if recorded.get(name) != inputs.get(name)
    ]
    return "; ".join(changes) or None
