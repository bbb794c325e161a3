"""A feature store in the memory of one process: `mem://`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, Any, Literal

from draftworks.errors import StoreError, StoreFullError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef
from draftworks.features.store_parts import LeaseTable, dtype_name, fill_in_ref, require_spec

if TYPE_CHECKING:
    from torch import Tensor

WhenFull = Literal["block", "refuse"]


@dataclass(frozen=True)
class _Stored:
    """A copy of a tensor, and its version counter, which every in-place change raises."""

    tensor: Tensor
    version: int | None


class MemoryFeatureStore(KeyedFeatureStore):
    """Copies of features in memory, until they are freed. Thread-safe.

    `get` returns the stored tensors themselves: they stay valid beyond the lease, and a reader that changes one in
    place makes the next `get` of it fail.

    Args:
        max_resident_bytes: all tensors together never take more; None for no limit.
        when_full: whether `put` waits for room ("block"), or raises StoreFullError at once ("refuse").
        put_timeout_s: `put` waits no longer than this, and then raises StoreFullError.
        max_hold_age_s: leases older than this are dropped by `gc`.
    """

    lease_bound = False

    def __init__(
        self,
        max_resident_bytes: int | None = None,
        when_full: WhenFull = "block",
        put_timeout_s: float = 600.0,
        max_hold_age_s: float = 3600.0,
    ) -> None:
        self._uri = f"mem://{uuid.uuid4().hex}"
        self._max_resident_bytes = max_resident_bytes
        self._when_full = when_full
        self._put_timeout_s = put_timeout_s
        self._stored: dict[str, _Stored] = {}
        self._deferred: list[tuple[str, int]] = []
        self._resident_bytes = 0
        self._leases = LeaseTable(max_hold_age_s)
        self._changed = Condition()
        self._owner = os.getpid()

    @property
    def uri(self) -> str:
        return self._uri

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Copy features into the store. A key that is stored already is not stored again.

        Raises:
            StoreFullError: there is no room (at once or after `put_timeout_s`, see `when_full`). It is a MemoryError too.
            StoreError: more bytes than the store may ever hold.
        """
        self._require_owner(ref.sample_id)
        with self._changed:
            for name, tensor in tensors.items():
                key = ref.feature_keys[name]
                if key not in self._stored and self._wait_for_room(ref.sample_id, key, tensor.nbytes):
                    own = tensor.detach().cpu().contiguous().clone()
                    self._stored[key] = _Stored(own, _version(own))
                    self._resident_bytes += own.nbytes
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        self._require_owner(ref.sample_id)
        with self._changed:
            tensors = {name: self._read(ref, name, key) for name, key in ref.feature_keys.items()}
            return tensors, self._leases.grant(ref.sample_id, ref.feature_keys.values())

    def release(self, handle: FeatureHandle) -> None:
        with self._changed:
            self._leases.end(handle)
            self._drop_deferred()

    def abort(self, sample_id: str) -> None:
        """Void the sample's leases. `put` buffers nothing that could be discarded."""
        with self._changed:
            self._leases.void(sample_id)
            self._drop_deferred()

    def gc(self) -> int:
        with self._changed:
            self._leases.expire()
            return self._drop_deferred()

    def health(self) -> dict[str, Any]:
        with self._changed:
            return {
                "uri": self.uri,
                "features": len(self._stored),
                "resident_bytes": self._resident_bytes,
                "max_resident_bytes": self._max_resident_bytes,
                "when_full": self._when_full,
                "leases": len(self._leases),
            }

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        with self._changed:
            return [key for key in keys if key not in self._stored]

    def free(self, keys: Iterable[str]) -> int:
        with self._changed:
            found = [(key, self._stored.pop(key).tensor.nbytes) for key in keys if key in self._stored]
            self._deferred += found
            return self._drop_deferred()

    def refresh(self) -> None:
        """No-op: no other process writes here."""

    def flush(self) -> None:
        """No-op: `put` buffers nothing."""

    def close(self) -> None:
        """No-op: the tensors go with the store."""

    def _drop_deferred(self) -> int:
        """Give up the room of freed tensors that no lease holds; return the bytes."""
        freed = sum(size for key, size in self._deferred if not self._leases.holds(key))
        self._deferred = [each for each in self._deferred if self._leases.holds(each[0])]
        self._resident_bytes -= freed
        self._changed.notify_all()
        return freed

    def _wait_for_room(self, sample_id: str, key: str, size: int) -> bool:
        """Wait until a tensor fits; return False if another thread has put it meanwhile."""
        limit = self._max_resident_bytes
        if limit is None:
            return True
        if size > limit:
            raise StoreError(
                f"sample {sample_id} has a feature of {size:,} bytes, and the memory store may hold {limit:,}: raise "
                "max_resident_bytes"
            )
        timeout_s = self._put_timeout_s if self._when_full == "block" else 0.0
        if not self._changed.wait_for(lambda: key in self._stored or self._resident_bytes + size <= limit, timeout_s):
            waited = f" for {timeout_s:g} s" if timeout_s else ""
            raise StoreFullError(
                f"sample {sample_id}: a feature of {size:,} bytes has no room in the memory store{waited}: "
                f"{self._resident_bytes:,} of {limit:,} bytes are taken by {len(self._stored)} features. Consume samples, "
                "or raise max_resident_bytes"
            )
        return key not in self._stored

    def _read(self, ref: SampleRef, name: str, key: str) -> Tensor:
        where = f"sample {ref.sample_id}, feature {name}"
        stored = self._stored.get(key)
        if stored is None:
            raise StoreError(f"{where}: key {key} is not in the memory store {self.uri}: it was freed, or never put")
        require_spec(ref.feature_specs.get(name), tuple(stored.tensor.shape), dtype_name(stored.tensor), where)
        if _version(stored.tensor) != stored.version:
            raise StoreError(f"{where}: a reader has changed the stored tensor in place. Copy it before changing it")
        return stored.tensor

    def _require_owner(self, sample_id: str) -> None:
        if os.getpid() != self._owner:
            raise StoreError(
                f"sample {sample_id}: the memory store {self.uri} is of process {self._owner}, asked by process "
                f"{os.getpid()}. Use a shared directory between processes"
            )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
