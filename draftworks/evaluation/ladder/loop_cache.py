"""Cache of rung 4 measurements, keyed by identity: `{folder}/{key}.json`.

Rung 4 is the only rung that runs the target, so it is measured once per draft, prompts and decoding, for any number of
reports. An entry records the device and time of its timings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from draftworks.config.decoding import Decoding
from draftworks.config.strict_yaml import describe_validation_error
from draftworks.errors import DraftworksError, StoreError
from draftworks.evaluation.ladder.measurement import LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.storage.files import MAX_JSON_BYTES, describe_changes, publish_json, read_bytes
from draftworks.storage.identity import digest

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LoopIdentity:
    """Everything that decides the result of a loop by one decoding; the report and the machine are not part of it.

    Attributes:
        weights_digest: of the draft; `strategy` and `options` are its other parts.
        prompts: digest of sample ids and tokens, and of the walks that the loop is compared with.
        stop_ids, max_new_tokens, max_length: where answers end.
        seed: of the random draws above temperature 0.
        revision: of the loop's code.
    """

    weights_digest: str
    strategy: str
    options: Mapping[str, Any]
    target_digest: str
    prompts: str
    decoding: Decoding
    draft_tokens: int
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    max_length: int | None
    compute_dtype: str
    seed: int
    revision: int

    def to_json(self) -> dict[str, Any]:
        """Return all values, those of the decoding beside the others: for greedy decoding `temperature` alone."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values |= value.to_json() if isinstance(value, Decoding) else {field.name: value}
        return {**values, "options": dict(self.options), "stop_ids": list(self.stop_ids)}

    @property
    def key(self) -> str:
        return digest(self.to_json())


@dataclass(frozen=True)
class LoopLookup:
    """Result of a look-up: the stored measurement; or the problem of an entry that cannot be used; or neither."""

    measurement: LoopMeasurement | None = None
    problem: str | None = None


class LoopEntry(BaseModel):
    """Contents of an entry's file. `digest` is of `measurement`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    identity: dict[str, Any]
    measurement: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class LoopCache:
    """A folder of rung 4 measurements. Entries are complete or absent at any moment; of two writers, the last wins.

    It knows nothing of ranks: the caller uses it on one.
    """

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> LoopCache:
        """Open the folder, and make it if it does not exist.

        Raises:
            StoreError: it is a file, or cannot be written to; checked here because decoding may take hours.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{folder}: expected the folder of the loop cache, which cannot be made: {error}"
            ) from error
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise StoreError(
                f"{folder}: the loop cache cannot be written to: grant this user write access, or choose another folder"
            )
        return cls(folder)

    def path(self, identity: LoopIdentity) -> Path:
        return self.folder / f"{identity.key}.json"

    def find(self, identity: LoopIdentity) -> LoopLookup:
        """Look up the measurement of an identity. A damaged entry, or one of another identity, is not used."""
        path = self.path(identity)
        try:
            entry = LoopEntry.model_validate_json(read_bytes(path, MAX_JSON_BYTES))
            if entry.identity != identity.to_json():
                differing = "; ".join(describe_changes(identity.to_json(), entry.identity))
                return LoopLookup(problem=f"{path} is of another loop: {differing}")
            if entry.digest != digest(entry.measurement):
                return LoopLookup(
                    problem=f"{path} is altered: expected {entry.digest}, found {digest(entry.measurement)}"
                )
            return LoopLookup(_measurement(entry.measurement))
        except FileNotFoundError:
            return LoopLookup()
        except ValidationError as error:
            return LoopLookup(problem=describe_validation_error(error, LoopEntry, str(path)))
        except (OSError, ValueError, LookupError, TypeError, DraftworksError) as error:
            return LoopLookup(problem=f"{path} cannot be read: {error!r}")

    def store(self, identity: LoopIdentity, measured: LoopMeasurement) -> Path:
        """Publish an entry atomically, replacing an existing one.

        Raises:
            StoreError: it cannot be written.
        """
        path = self.path(identity)
        values = {**measured.to_json(), "prompts": [asdict(prompt) for prompt in measured.prompts]}
        entry = LoopEntry(identity=identity.to_json(), measurement=values, digest=digest(values))
        try:
            publish_json(path, entry.model_dump(mode="json"))
        except OSError as error:
            raise StoreError(f"{path}: a loop measurement cannot be stored: {error}") from error
        return path


def _measurement(values: Mapping[str, Any]) -> LoopMeasurement:
    prompts = (PromptAcceptance(**{**each, "histogram": tuple(each["histogram"])}) for each in values["prompts"])
    return LoopMeasurement.from_json(values, tuple(prompts))
