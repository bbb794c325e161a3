"""From the name of a format and a folder to the reader that computes what a server would."""

from __future__ import annotations

from pathlib import Path

import torch

from draftworks.config.strategies import load_dotted, resolve_export
from draftworks.export.readers.files import ExportFolder
from draftworks.export.readers.reader import ExportReader, TargetTensors


def open_export(
    export_format: str, folder: Path, target: TargetTensors, dtype: torch.dtype = torch.float64
) -> ExportReader:
    """The exported draft, checked for everything that loaders pass over in silence.

    Args:
        dtype: what to compute in, whatever the file holds.

    Raises:
        ConfigError: no such format.
        StoreError: the files are not a draft of that format for this target.
    """
    read = load_dotted(resolve_export(export_format).reader)
    return read(ExportFolder.read(folder), target, dtype)
