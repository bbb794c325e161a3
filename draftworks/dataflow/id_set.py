"""A set of sample ids in 16 bytes each, for streams whose memory must not grow with Python objects."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

_DIGEST_BYTES = 16
_SMALLEST_MERGE = 4096


class SampleIdSet:
    """Ids as 128-bit digests: a sorted array, and a small Python set of the latest ones that is merged into it.

    Two different ids are taken for equal with a probability of about n^2 / 2^129, which is 1e-27 for a million ids.
    """

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._sorted = np.empty(0, dtype=f"S{_DIGEST_BYTES}")
        self._recent: set[bytes] = set()
        for sample_id in ids:
            self.add(sample_id)

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, sample_id: str) -> bool:
        return self._holds(_digest(sample_id))

    def add(self, sample_id: str) -> bool:
        """Add an id; return False if it was in the set already."""
        digest = _digest(sample_id)
        if self._holds(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) > max(_SMALLEST_MERGE, len(self._sorted) // 32):
            recent = np.array(sorted(self._recent), dtype=self._sorted.dtype)
            self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, recent), recent)
            self._recent.clear()
        return True

    def _holds(self, digest: bytes) -> bool:
        if digest in self._recent:
            return True
        place = int(np.searchsorted(self._sorted, np.bytes_(digest)))
        # numpy strips trailing NULs of an item, so both sides are compared without them.
        return place < len(self._sorted) and self._sorted[place] == digest.rstrip(b"\0")


def _digest(sample_id: str) -> bytes:
    return blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
