"""A local feature store that is read and never written to: `file://`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.wrapped_store import WrappedStore

if TYPE_CHECKING:
    from torch import Tensor


class ReadOnlyFeatureStore(WrappedStore):
    """Features that a `LocalFeatureStore` has stored, for readers of stored feature sets. No call changes a file.

    Args:
        uri: `file:///folder`, as references and manifests name a local store.
        verify_reads: compare each tensor's checksum on its first read.
        max_hold_age_s: leases older than this are dropped by `gc`.

    Raises:
        StoreError: `uri` is of another scheme, or there is no local store.
    """

    def __init__(self, uri: str, verify_reads: bool = True, max_hold_age_s: float = 3600.0) -> None:
        self.uri = uri
        root = _parse_root(uri)
        if not (root / "shards").is_dir():
            raise StoreError(f"{uri}: expected a local feature store, found no folder {root / 'shards'}")
        self._local = LocalFeatureStore(root, verify_reads, max_hold_age_s=max_hold_age_s, read_only=True)
        super().__init__(self._local)

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Raise StoreError."""
        raise StoreError(f"sample {ref.sample_id} cannot be put into {self.uri}: it was opened to be read only")

    def abort(self, sample_id: str) -> None:
        """Raise StoreError."""
        raise StoreError(f"sample {sample_id} cannot be aborted in {self.uri}: it was opened to be read only")

    def gc(self) -> int:
        """Drop old leases; return 0."""
        self._local.expire_leases()
        return 0

    def refresh(self) -> None:
        """Read what other processes have published or removed since."""
        self._local.refresh()


def _parse_root(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise StoreError(f"{uri!r}: expected the address of a local feature store, file:///folder")
    return Path(unquote(parts.path))
