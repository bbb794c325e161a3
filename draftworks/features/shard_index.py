"""Which keys which shards hold, without those that were freed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from draftworks.features.shards import ShardHeader


class ShardIndex:
    """Index of the shards of a folder by key. Its store's lock protects it."""

    def __init__(self) -> None:
        self._headers: dict[Path, ShardHeader] = {}
        self._holders: dict[str, tuple[ShardHeader, ...]] = {}
        self._freed: dict[Path, frozenset[str]] = {}

    @property
    def headers(self) -> Collection[ShardHeader]:
        return self._headers.values()

    @property
    def paths(self) -> set[Path]:
        return set(self._headers)

    @property
    def freed(self) -> dict[Path, frozenset[str]]:
        """The freed keys of the shards that have some."""
        return self._freed

    @property
    def num_keys(self) -> int:
        return len(self._holders)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, freed ones too: their shards are still there."""
        return sum(header.nbytes for header in self.headers)

    @property
    def freed_bytes(self) -> int:
        return sum(self._headers[path].entries[key].nbytes for path, keys in self._freed.items() for key in keys)

    def find(self, path: Path) -> ShardHeader | None:
        """Return the header of a shard; None if it is not known."""
        return self._headers.get(path)

    def holders(self, key: str) -> tuple[ShardHeader, ...]:
        """Return the shards that hold a key, the first known first; several where processes stored it at one time."""
        return self._holders.get(key, ())

    def add(self, header: ShardHeader, freed: Collection[str] = ()) -> None:
        """Add a shard, or what is known of it again, of whose keys those in `freed` do not count."""
        self._headers[header.path] = header
        alone, freed = (header,), header.entries.keys() & freed
        for key in header.entries:
            others = self._others(key, header.path)
            if key not in freed:
                self._holders[key] = (*others, header) if others else alone
            elif others:
                self._holders[key] = others
            else:
                self._holders.pop(key, None)
        self._freed.pop(header.path, None)
        if freed:
            self._freed[header.path] = frozenset(freed)

    def remove(self, path: Path) -> None:
        """Forget a shard that is gone."""
        header = self._headers[path]
        self.add(header, header.entries)
        del self._headers[path]
        self._freed.pop(path, None)

    def find_emptied(self, path: Path) -> ShardHeader | None:
        """Return the header of a shard whose keys are all freed; None if it holds any, or is not known."""
        header = self._headers.get(path)
        return None if header is None or len(self._freed.get(path, ())) < len(header.entries) else header

    def _others(self, key: str, path: Path) -> tuple[ShardHeader, ...]:
        holders = self._holders.get(key, ())
        return tuple(other for other in holders if other.path != path) if holders else holders
