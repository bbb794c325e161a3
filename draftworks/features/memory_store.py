"""A feature store in the memory of one process, each sample read by one reader and freed: `mem://`."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs

from draftworks.errors import StoreError, StoreFullError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef
from draftworks.features.leases import Lease, LeaseTable
from draftworks.features.specs import dtype_name, fill_in_ref, require_all_features, require_spec

if TYPE_CHECKING:
    from torch import Tensor

WhenFull = Literal["block", "refuse"]


@dataclass(frozen=True)
class _Sample:
    """One generation of a sample. `versions` are the tensors' version counters, which every in-place change raises."""

    generation: int
    tensors: Mapping[str, Tensor]
    versions: Mapping[str, int | None]
    nbytes: int
    since: float


class MemoryFeatureStore(FeatureStore):
    """Copies of samples in memory, freed when the last lease of the current generation is released. Thread-safe.

    `put` supersedes what was put for the sample before; a ref carries its generation in `mem://{id}?generation={n}`.
    `get` returns the stored tensors themselves: they stay valid beyond the lease, and a reader that changes one in
    place makes the next `get` of it fail.

    Args:
        max_resident_bytes: the tensors of all samples together never take more; None for no limit.
        when_full: whether `put` waits for room ("block"), or raises StoreFullError at once ("refuse").
        put_timeout_s: `put` waits no longer than this, and then raises StoreFullError.
        max_hold_age_s: leases older than this are dropped by `gc`; their samples can be read again.
        max_sample_age_s: unleased samples older than this are removed by `gc`; None keeps them.
    """

    lease_bound = False

    def __init__(
        self,
        max_resident_bytes: int | None = None,
        when_full: WhenFull = "block",
        put_timeout_s: float = 600.0,
        max_hold_age_s: float = 3600.0,
        max_sample_age_s: float | None = None,
    ) -> None:
        self.uri = f"mem://{uuid.uuid4().hex}"
        self._max_resident_bytes = max_resident_bytes
        self._when_full = when_full
        self._put_timeout_s = put_timeout_s
        self._max_sample_age_s = max_sample_age_s
        self._samples: dict[str, _Sample] = {}
        self._resident_bytes = 0
        self._generations = itertools.count(1)
        self._leases = LeaseTable(max_hold_age_s)
        self._aborts: Counter[str] = Counter()
        self._changed = Condition()
        self._owner = os.getpid()

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Copy all features of a sample into the store; return the ref with its generation.

        Raises:
            StoreFullError: there is no room (at once or after `put_timeout_s`, see `when_full`). It is a MemoryError too.
            StoreError: not the features that the ref names, more bytes than the store may ever hold, or the sample was
                aborted while `put` waited.
        """
        self._require_owner(ref.sample_id)
        require_all_features(ref, tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._changed:
            self._wait_for_room(ref.sample_id, size)
            own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            self._drop(ref.sample_id)
            versions = {name: _version(tensor) for name, tensor in own.items()}
            sample = _Sample(next(self._generations), own, versions, size, time.monotonic())
            self._samples[ref.sample_id] = sample
            self._resident_bytes += size
        return fill_in_ref(ref, own, f"{self.uri}?generation={sample.generation}")

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Return tensors by feature name; StoreError also if the ref is of another store or was superseded."""
        self._require_owner(ref.sample_id)
        generation = self._generation_of(ref)
        with self._changed:
            sample = self._samples.get(ref.sample_id)
            if sample is None or sample.generation != generation:
                raise StoreError(self._absent(ref.sample_id, generation, sample))
            tensors = {name: _read(sample, ref, name) for name in ref.feature_keys}
            return tensors, self._leases.grant(ref.sample_id, generation, [ref.sample_id])

    def release(self, handle: FeatureHandle) -> None:
        """Return the lease; the last one of a sample's current generation frees it."""
        with self._changed:
            lease = self._leases.end(handle)
            if lease is not None and self._is_current(lease) and not self._leases.holds(lease.sample_id):
                self._drop(lease.sample_id)

    def abort(self, sample_id: str) -> None:
        """Fail a put of the sample that waits for room, and void its leases, so that releasing them frees nothing.

        What is stored stays, and can be read again.
        """
        with self._changed:
            self._aborts[sample_id] += 1
            self._leases.void(sample_id)
            self._changed.notify_all()

    def gc(self) -> int:
        """Drop old leases and remove unleased samples beyond their age; return the bytes freed."""
        with self._changed:
            self._leases.expire()
            before = self._resident_bytes
            for sample_id in [name for name, sample in self._samples.items() if self._is_expired(name, sample)]:
                self._drop(sample_id)
            return before - self._resident_bytes

    def health(self) -> dict[str, Any]:
        with self._changed:
            return {
                "uri": self.uri,
                "samples": len(self._samples),
                "resident_bytes": self._resident_bytes,
                "max_resident_bytes": self._max_resident_bytes,
                "when_full": self._when_full,
                "leases": len(self._leases),
            }

    def _wait_for_room(self, sample_id: str, size: int) -> None:
        limit = self._max_resident_bytes
        if limit is None:
            return
        if size > limit:
            raise StoreError(
                f"sample {sample_id} has {size:,} bytes, and the memory store may hold {limit:,}: raise max_resident_bytes"
            )
        aborts = self._aborts[sample_id]

        def settled() -> bool:
            superseded = self._samples.get(sample_id)
            freed = 0 if superseded is None else superseded.nbytes
            return self._aborts[sample_id] != aborts or self._resident_bytes - freed + size <= limit

        timeout_s = self._put_timeout_s if self._when_full == "block" else 0.0
        if not self._changed.wait_for(settled, timeout_s):
            waited = f" for {timeout_s:g} s" if timeout_s else ""
            raise StoreFullError(
                f"sample {sample_id} of {size:,} bytes has no room in the memory store{waited}: {self._resident_bytes:,} of "
                f"{limit:,} bytes are taken by {len(self._samples)} samples, {len(self._leases)} leases. "
                f"Consume samples, or raise max_resident_bytes"
            )
        if self._aborts[sample_id] != aborts:
            raise StoreError(f"sample {sample_id} was aborted while it was being put")

    def _drop(self, sample_id: str) -> None:
        """Remove a sample with the leases on it."""
        sample = self._samples.pop(sample_id, None)
        if sample is not None:
            self._leases.void(sample_id)
            self._resident_bytes -= sample.nbytes
            self._changed.notify_all()

    def _is_current(self, lease: Lease) -> bool:
        sample = self._samples.get(lease.sample_id)
        return sample is not None and sample.generation == lease.generation

    def _is_expired(self, sample_id: str, sample: _Sample) -> bool:
        if self._max_sample_age_s is None or self._leases.holds(sample_id):
            return False
        return time.monotonic() - sample.since > self._max_sample_age_s

    def _generation_of(self, ref: SampleRef) -> int:
        uri, _, query = ref.feature_store_uri.partition("?")
        generation = parse_qs(query).get("generation", [""])[0]
        if uri != self.uri or not generation.isdecimal():
            raise StoreError(
                f"sample {ref.sample_id} is in the store {ref.feature_store_uri or 'of nobody'}, expected "
                f"{self.uri}?generation=N: features in memory are read by the process that put them"
            )
        return int(generation)

    def _absent(self, sample_id: str, generation: int, newest: _Sample | None) -> str:
        where = f"sample {sample_id}: generation {generation} in {self.uri}"
        if newest is None:
            return f"{where} is gone: released for the last time, or removed by gc. Put it again"
        return f"{where} is superseded by generation {newest.generation}. Use the ref that this put returned"

    def _require_owner(self, sample_id: str) -> None:
        if os.getpid() != self._owner:
            raise StoreError(
                f"sample {sample_id}: the memory store {self.uri} is of process {self._owner}, asked by process "
                f"{os.getpid()}. Use a shared directory between processes"
            )


def _read(sample: _Sample, ref: SampleRef, name: str) -> Tensor:
    tensor = sample.tensors.get(name)
    if tensor is None:
        raise StoreError(f"sample {ref.sample_id} has no feature {name}, it has {sorted(sample.tensors)}")
    where = f"sample {ref.sample_id}, feature {name}"
    require_spec(ref.feature_specs.get(name), tuple(tensor.shape), dtype_name(tensor), where)
    if _version(tensor) != sample.versions[name]:
        raise StoreError(f"{where}: a reader has changed the stored tensor in place. Copy it before changing it")
    return tensor


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
