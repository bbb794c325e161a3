"""Where an engine hands hidden states over to. Torch-free."""

from __future__ import annotations

from pathlib import Path


def make_destination(spool: Path, mooncake: Path | None = None) -> dict[str, str]:
    """Return what an engine is told at its start about where hidden states go: the folder, or the store instead.

    Args:
        mooncake: address file of the Mooncake store that hidden states go through, instead of the spool.
    """
    return {"spool": str(spool)} if mooncake is None else {"mooncake": str(mooncake)}
