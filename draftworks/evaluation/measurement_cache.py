"""A folder of measurements that are kept by what decides them: `{folder}/{key}.json`. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from draftworks.config.strict_yaml import describe_validation_error
from draftworks.errors import StoreError
from draftworks.storage.files import MAX_JSON_BYTES, describe_changes, publish_json, read_bytes
from draftworks.storage.identity import digest

SCHEMA_VERSION = 1


class MeasurementEntry(BaseModel):
    """Contents of an entry's file. `digest` is of `measurement`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    identity: dict[str, Any]
    measurement: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class MeasurementLookup:
    """Result of a look-up: the stored values; or the problem of an entry that cannot be used; or neither."""

    values: Mapping[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class MeasurementCache:
    """A folder of measurements. Entries are complete or absent at any moment; of two writers, the last wins.

    It knows nothing of ranks: the caller uses it on one.

    Attributes:
        what: what one entry is of, in messages.
    """

    folder: Path
    what: str

    @classmethod
    def open(cls, folder: Path, what: str) -> MeasurementCache:
        """Open the folder, and make it if it does not exist.

        Raises:
            StoreError: it is a file, or cannot be written to; checked here because measuring may take hours.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{folder}: expected the folder of the {what} cache, which cannot be made: {error}"
            ) from error
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise StoreError(
                f"{folder}: the {what} cache cannot be written to: grant this user write access, or choose another folder"
            )
        return cls(folder, what)

    def path(self, identity: Mapping[str, Any]) -> Path:
        return self.folder / f"{digest(dict(identity))}.json"

    def find(self, identity: Mapping[str, Any]) -> MeasurementLookup:
        """Look up the measurement of an identity. A damaged entry, or one of another identity, is not used."""
        path = self.path(identity)
        try:
            entry = MeasurementEntry.model_validate_json(read_bytes(path, MAX_JSON_BYTES))
        except FileNotFoundError:
            return MeasurementLookup()
        except ValidationError as error:
            return MeasurementLookup(problem=describe_validation_error(error, MeasurementEntry, str(path)))
        except (OSError, ValueError) as error:
            return MeasurementLookup(problem=f"{path} cannot be read: {error!r}")
        if entry.identity != identity:
            differing = "; ".join(describe_changes(identity, entry.identity))
            return MeasurementLookup(problem=f"{path} is of another {self.what}: {differing}")
        if entry.digest != digest(entry.measurement):
            found = digest(entry.measurement)
            return MeasurementLookup(problem=f"{path} is altered: expected {entry.digest}, found {found}")
        return MeasurementLookup(entry.measurement)

    def store(self, identity: Mapping[str, Any], values: Mapping[str, Any]) -> Path:
        """Publish an entry atomically, replacing an existing one.

        Raises:
            StoreError: it cannot be written.
        """
        path = self.path(identity)
        entry = MeasurementEntry(identity=dict(identity), measurement=dict(values), digest=digest(dict(values)))
        try:
            publish_json(path, entry.model_dump(mode="json"))
        except OSError as error:
            raise StoreError(f"{path}: a {self.what} measurement cannot be stored: {error}") from error
        return path
