"""What stores have in common: leases of this process on samples, and specs of tensors compared with what is read."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureSpec, SampleRef

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Lease:
    """A lease: `holds` names what must not be freed before it ends."""

    sample_id: str
    holds: frozenset[Hashable]
    since: float


class LeaseTable:
    """The leases of a store object, by token. Its store's lock protects it.

    Args:
        max_hold_age_s: `expire` ends leases that are older.
    """

    def __init__(self, max_hold_age_s: float) -> None:
        self.max_hold_age_s = max_hold_age_s
        self._leases: dict[str, Lease] = {}
        self._held: Counter[Hashable] = Counter()

    def grant(self, sample_id: str, holds: Iterable[Hashable] = ()) -> FeatureHandle:
        handle = FeatureHandle(sample_id, uuid.uuid4().hex)
        lease = Lease(sample_id, frozenset(holds), time.monotonic())
        self._leases[handle.lease_token] = lease
        self._held.update(lease.holds)
        return handle

    def end(self, handle: FeatureHandle) -> Lease | None:
        """End the lease of a handle; None if it has ended before, or is of another process."""
        return self._end(handle.lease_token)

    def void(self, sample_id: str) -> list[Lease]:
        """End all leases of a sample, so that their handles are stale."""
        return self._end_where(lambda lease: lease.sample_id == sample_id)

    def expire(self) -> list[Lease]:
        """End the leases that are too old."""
        oldest = time.monotonic() - self.max_hold_age_s
        return self._end_where(lambda lease: lease.since < oldest)

    def holds(self, item: Hashable) -> bool:
        return item in self._held

    def __len__(self) -> int:
        return len(self._leases)

    def _end_where(self, condition: Callable[[Lease], bool]) -> list[Lease]:
        tokens = [token for token, lease in self._leases.items() if condition(lease)]
        return [lease for lease in map(self._end, tokens) if lease is not None]

    def _end(self, token: str) -> Lease | None:
        lease = self._leases.pop(token, None)
        for item in () if lease is None else lease.holds:
            self._held[item] -= 1
            if not self._held[item]:
                del self._held[item]
        return lease


def fill_in_ref(ref: SampleRef, tensors: Mapping[str, Tensor], uri: str) -> SampleRef:
    """Return the ref of a sample after `tensors` were put: store, shapes, dtypes and bytes filled in."""
    specs = {**ref.feature_specs, **{name: _describe(ref, name, tensor) for name, tensor in tensors.items()}}
    size = sum(spec.nbytes for spec in specs.values())
    return replace(ref, feature_store_uri=uri, feature_specs=specs, estimated_bytes=size)


def require_spec(spec: FeatureSpec | None, shape: tuple[int, ...], dtype: str, where: str) -> None:
    """Raise StoreError that begins with `where` unless what is stored has the shape and dtype of a ref's spec, if any."""
    if spec is not None and (tuple(spec.shape), spec.dtype) != (shape, dtype):
        raise StoreError(f"{where}: expected shape {tuple(spec.shape)} of {spec.dtype}, found {shape} of {dtype}")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe(ref: SampleRef, name: str, tensor: Tensor) -> FeatureSpec:
    """Return the ref's spec of a feature (its `target_repr`) with the shape and dtype of `tensor`."""
    known = ref.feature_specs.get(name, FeatureSpec(name, (), ""))
    return replace(known, shape=tuple(tensor.shape), dtype=dtype_name(tensor))
