"""From the name of a format and a folder to the reader that computes what a server would."""

from __future__ import annotations

from pathlib import Path

import torch

from draftworks.errors import ConfigError
from draftworks.export.readers.dflash_layouts import read_speculators_dflash, read_zlab_dflash
from draftworks.export.readers.eagle3_layouts import read_sglang_eagle3, read_speculators_eagle3
from draftworks.export.readers.files import ExportFolder
from draftworks.export.readers.reader import ExportReader, TargetTensors

_READERS = {
    "sglang_eagle3": read_sglang_eagle3,
    "speculators_eagle3": read_speculators_eagle3,
    "zlab_dflash": read_zlab_dflash,
    "speculators_dflash": read_speculators_dflash,
}


def open_export(
    export_format: str, folder: Path, target: TargetTensors, dtype: torch.dtype = torch.float64
) -> ExportReader:
    """The exported draft, checked for everything that loaders pass over in silence.

    Args:
        dtype: what to compute in, whatever the file holds.

    Raises:
        ConfigError: no reader for that format.
        StoreError: the files are not a draft of that format for this target.
    """
    if export_format not in _READERS:
        raise ConfigError(f"no reader for the export format {export_format!r}: there are {', '.join(_READERS)}")
    return _READERS[export_format](ExportFolder.read(folder), target, dtype)
