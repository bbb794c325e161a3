"""Finds the files of a target by name, in a directory or at a commit of the hub. Torch-free."""

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
    """The files of a target in its directory or on the hub; a hub file is downloaded on the first request for it."""

    target: TargetFiles

    @property
    def where(self) -> str:
        """Name, path or hub id, and commit of the target, for messages."""
        at = "" if self.target.revision is None else f" at commit {self.target.revision}"
        return f"target {self.target.name}: {self.target.model}{at}"

    def require_folder(self) -> None:
        """Raise ConfigError if the target has no revision (so it must be a directory) and that directory is absent."""
        if self.target.revision is None and not Path(self.target.model).is_dir():
            raise ConfigError(
                f"{self.where}: no such directory. Correct `model`, or give the `revision` (commit) of a hub id."
            )

    def find_file(self, filename: str) -> Path | None:
        """Return the local path of a file; None if the target has no such file."""
        if self.target.revision is not None:
            return fetch_hub_file(f"target {self.target.name}", self.target.model, self.target.revision, filename)
        path = Path(self.target.model) / filename
        return path if path.is_file() else None

    def require_file(self, filename: str) -> Path:
        """Return the local path of a file of weights. Raises StoreError if the target has no such file."""
        path = self.find_file(filename)
        if path is None:
            raise StoreError(f"{self.where}: {filename} is missing; weights must be safetensors")
        return path

    def read_index(self) -> dict[str, str] | None:
        """Return the file name of each tensor from the index; None without an index.

        Raises:
            StoreError: the index is not JSON, or does not map tensors to names of files in the same folder.
        """
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
