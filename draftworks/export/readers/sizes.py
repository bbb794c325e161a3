"""What the arithmetic of a draft's decoder layers takes from its config; all other sizes are those of the tensors."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.export.readers.files import ExportFolder
from draftworks.export.readers.rope import RopeTable, read_rope


@dataclass(frozen=True)
class LayerSizes:
    """Number of decoder layers, and the constants of each. They are explicit in an export: Llama's and Qwen3's defaults
    differ."""

    layers: int
    head_dim: int
    eps: float
    rope: RopeTable

    @classmethod
    def read(cls, folder: ExportFolder, section: str = "") -> LayerSizes:
        """Read the keys under the prefix `section`, which is empty or ends with a dot. Raises StoreError for a missing one."""
        head_dim = folder.require_setting(f"{section}head_dim")
        return cls(
            layers=folder.require_setting(f"{section}num_hidden_layers"),
            head_dim=head_dim,
            eps=folder.require_setting(f"{section}rms_norm_eps"),
            rope=read_rope(folder, section, head_dim),
        )
