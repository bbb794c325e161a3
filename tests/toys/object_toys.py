"""Feature stores in object storage without a server, for the contract of all stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store_harness import StoreHarness
from torch import Tensor

from draftworks.features.feature_cache import FeatureCache
from draftworks.features.object_feature_store import ObjectFeatureStore
from draftworks.storage.object_store import ObjectStore

CACHE_BYTES = 1 << 20


@dataclass
class ObjectHarness(StoreHarness):
    """A store of features in `objects`; opened objects share a cache, as the processes of a machine do."""

    folder: Path
    keyed: bool = True
    shared: bool = True
    start_method: str = "spawn"
    cached: bool = True

    def connect(self) -> ObjectStore:
        """Return the storage, as another process would."""
        from obstore.store import LocalStore

        return ObjectStore(LocalStore(self.folder / "objects", mkdir=True), "s3://toys/features", "features", retry_s=0)

    def open(self, max_hold_age_s: float = 3600.0) -> ObjectFeatureStore:
        cache = FeatureCache(self.folder / "cache", CACHE_BYTES) if self.cached else None
        self.folder.mkdir(exist_ok=True)
        (self.folder / "cache").mkdir(exist_ok=True)
        return ObjectFeatureStore(self.connect(), cache, max_hold_age_s=max_hold_age_s, orphan_age_s=0.0, requests=2)

    def alter(self, stored: Tensor) -> None:
        path, content, start = self._find(stored)
        content[start] ^= 0x10
        self._replace(path, bytes(content))

    def truncate(self, stored: Tensor) -> None:
        path, content, _ = self._find(stored)
        self._replace(path, bytes(content[:-1]))

    def stored_bytes(self) -> int:
        return sum(found.nbytes for found in self.connect().list("shards"))

    def leftovers(self) -> list[str]:
        store = self.open()
        named = {header.path.name for header in store._index.shards.headers}
        return [found.path for found in self.connect().list("shards") if Path(found.path).name not in named]

    def _replace(self, path: str, content: bytes) -> None:
        objects = self.connect()
        objects.remove([path])
        assert objects.create(path, content)

    def _find(self, stored: Tensor) -> tuple[str, bytearray, int]:
        wanted = bytes(stored.contiguous().numpy().tobytes())
        objects = self.connect()
        for found in objects.list("shards"):
            content = bytearray(objects.read(found.path).content)
            if wanted in content:
                return found.path, content, content.index(wanted)
        raise AssertionError("no object has the tensor")


@dataclass
class MemoryHarness(ObjectHarness):
    """The same in the memory of this process: cheap, and read by no other."""

    shared: bool = False
    store: Any = field(default=None)

    def connect(self) -> ObjectStore:
        from obstore.store import MemoryStore

        if self.store is None:
            self.store = MemoryStore()
        return ObjectStore(self.store, "s3://toys/features", "features", retry_s=0)
