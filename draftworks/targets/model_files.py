"""The files of a target by name, in a directory or at a commit of the hub. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.hub import fetch_hub_file
from draftworks.storage.regular_files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """Where a target's files are; those of the hub are downloaded when they are asked for."""

    target: TargetFiles

    @property
    def where(self) -> str:
        """The target, for messages."""
        at = "" if self.target.revision is None else f" at commit {self.target.revision}"
        return f"target {self.target.name}: {self.target.model}{at}"

    def require_folder(self) -> None:
        """ConfigError where the target should be a directory and is none."""
        if self.target.revision is None and not Path(self.target.model).is_dir():
            raise ConfigError(
                f"{self.where}: no such directory. Correct `model`, or give the `revision` (commit) of a hub id."
            )

    def find_file(self, filename: str) -> Path | None:
        """Where a file is; None if the target has no such file."""
        if self.target.revision is not None:
            return fetch_hub_file(f"target {self.target.name}", self.target.model, self.target.revision, filename)
        path = Path(self.target.model) / filename
        return path if path.is_file() else None

    def require_file(self, filename: str) -> Path:
        """Where a file of weights is. Raises StoreError if there is none."""
        path = self.find_file(filename)
        if path is None:
            raise StoreError(f"{self.where}: {filename} is missing; weights must be safetensors")
        return path

    def read_index(self) -> dict[str, str] | None:
        """File of each tensor, as the index says; None if there is no index. Raises StoreError for one that is none."""
        path = self.find_file(INDEX)
        if path is None:
            return None
        try:
            weight_map = read_json(path)["weight_map"]
            plain = all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{path}: not a safetensors index: {error!r}. Copy or download it again") from error
        if not plain:
            raise StoreError(f"{path}: not a safetensors index: expected names of files in the same folder")
        return dict(weight_map)
