"""What a draft on disk says of itself. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.storage.regular_files import read_json

SCHEMA_VERSION = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class DraftConfig:
    """What config.json holds.

    Attributes:
        draft: the strategy's own description, with its options.
        target_digest: of the target the draft was trained for.
        weights_digest: of model.safetensors, so that the two files cannot be mixed up.
        provenance: whatever else is worth knowing: data, training, versions. Never checked.
    """

    strategy: str
    draft: dict[str, Any]
    target_digest: str
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def read_draft_config(folder: Path) -> DraftConfig:
    """The draft's config.json.

    Raises:
        StoreError: missing, damaged, or of another schema.
    """
    path = folder / CONFIG
    try:
        values = read_json(path)
        config = DraftConfig(**values)
    except FileNotFoundError:
        raise StoreError(f"{folder}: not a draft: {CONFIG} is missing") from None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: not the config of a draft ({error}). Train the draft again") from error
    if config.schema_version != SCHEMA_VERSION:
        raise StoreError(f"{path}: schema {config.schema_version}, expected {SCHEMA_VERSION}")
    return config
