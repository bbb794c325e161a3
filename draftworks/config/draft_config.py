"""The config.json of a draft on disk. Torch-free."""

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
    """Contents of a draft's config.json.

    Attributes:
        draft: description by the strategy, with its options.
        target_digest: digest of the target that the draft was trained for.
        weights_digest: digest of model.safetensors, so that files of two drafts cannot be mixed.
        provenance: data, training and versions, for information; never checked.
    """

    strategy: str
    draft: dict[str, Any]
    target_digest: str
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def read_draft_config(folder: Path) -> DraftConfig:
    """Read a draft's config.json.

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
