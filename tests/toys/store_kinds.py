"""Content-keyed stores by the names that tests give them."""

from __future__ import annotations

from pathlib import Path

from draftworks.features.contracts import KeyedFeatureStore
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.memory_store import MemoryFeatureStore


def open_keyed_store(kind: str, folder: Path) -> KeyedFeatureStore:
    return MemoryFeatureStore() if kind == "memory" else KeyedSharedDirStore(folder / "store")
