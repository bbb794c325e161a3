"""Samples in Mooncake, consumed once: features go from a producer's memory to a consumer's without a disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import RLock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, FeatureStore, SampleRef
from draftworks.features.leases import LeaseTable
from draftworks.features.mooncake_entries import MooncakeEntries
from draftworks.features.mooncake_head import Head, ObjectKey
from draftworks.features.sample_folder import sample_key
from draftworks.features.specs import dtype_name, fill_in_ref, require_spec
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient

if TYPE_CHECKING:
    from torch import Tensor


class MooncakeFeatureStore(FeatureStore):
    """Samples that any number of processes put and get. Thread-safe.

    `put` publishes a whole sample at once and supersedes earlier generations of it, for every process; its generation
    is in the keys of the ref. Leases belong to the process: with `retain_on_release=False` the last release here frees
    the sample, whoever else has read it. Tensors are copies in memory, valid beyond their lease.

    A dead owner of the memory or a dead master is a lost store: every call raises StoreLostError, within the address's
    timeout, until the service was started again and `reconnect` called.

    Args:
        address: of a `MooncakeService` that runs.
        retain_on_release: keep a sample when its last lease is released.
        put_timeout_s: seconds for which `put` waits for room in a full store; 0 refuses at once.
        sole_reader: no other process reads the samples that this one releases, so that their memory is free at once and
            not when Mooncake's lease has run out.
        max_hold_age_s: leases older than this are dropped by `gc`.
        orphan_age_s: tensors put longer ago that belong to no sample are removed by `gc`.
        client: a connection to the same address that others use too; by default the store has its own.

    Raises:
        ConfigError: Mooncake is not installed.
        StoreLostError: nothing answers at the address.
    """

    lease_bound = False

    def __init__(
        self,
        address: MooncakeAddress,
        retain_on_release: bool = False,
        put_timeout_s: float = 60.0,
        sole_reader: bool = False,
        max_hold_age_s: float = 3600.0,
        orphan_age_s: float = 3600.0,
        client: MooncakeClient | None = None,
    ) -> None:
        self.retain_on_release = retain_on_release
        self._address = address
        used = client or MooncakeClient(address)
        self._owned_client = used if client is None else None
        self._entries = MooncakeEntries(used, put_timeout_s, sole_reader, orphan_age_s)
        self._leases = LeaseTable(max_hold_age_s)
        self._aborts: Counter[str] = Counter()
        self._lock = RLock()

    @property
    def uri(self) -> str:
        return self._address.uri

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Publish all features of a sample; the returned ref's keys are those of its tensors in Mooncake.

        Raises:
            StoreError: not the features that the ref names, or the sample was aborted meanwhile.
            StoreFullError: there was no room until the timeout.
        """
        if tensors.keys() != ref.feature_keys.keys():
            raise StoreError(
                f"sample {ref.sample_id}: expected the features {sorted(ref.feature_keys)} at once, found {sorted(tensors)}"
            )
        entry = sample_key(ref.sample_id)
        aborts = self._aborts[entry]

        def proceed() -> None:
            if self._aborts[entry] != aborts:
                raise StoreError(f"sample {ref.sample_id} was aborted while it was being put")

        where = f"sample {ref.sample_id}"
        generation = self._entries.put(where, {entry: tensors}, supersede=True, proceed=proceed)[entry]
        keys = {name: self._entries.tensor_key(entry, generation, name) for name in tensors}
        return fill_in_ref(ref, tensors, self.uri, keys)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Return tensors by feature name; StoreError also if the ref is of another store or was superseded."""
        places = self._parse_keys(ref)
        place = next(iter(places.values()))
        with self._lock:
            handle = self._leases.grant(ref.sample_id, place.generation, [(place.entry, place.generation)])
        try:
            names = {name: unquote(at.name) for name, at in places.items()}
            quick = self._try_read(ref, place, names)
            if quick is not None:
                return quick, handle
            head = self._require_head(ref, place)
            _require_agreement(ref, head, names)
            found = self._entries.read(
                f"sample {ref.sample_id}", [(place.entry, head, stored) for stored in names.values()]
            )
            if found is None:
                raise StoreError(self._describe_absent(ref, place, self._entries.read_heads([place.entry])))
            return dict(zip(names, found, strict=True)), handle
        except BaseException:
            with self._lock:
                self._leases.end(handle)
            raise

    def release(self, handle: FeatureHandle) -> None:
        """Return the lease. Without `retain_on_release`, the last one of a generation frees the sample."""
        with self._lock:
            lease = self._leases.end(handle)
            if lease is None or self.retain_on_release or any(map(self._leases.holds, lease.holds)):
                return
        entry = sample_key(lease.sample_id)
        head = self._entries.read_heads([entry]).get(entry)
        if head is not None and head.generation == lease.generation:
            self._entries.unpublish([entry])
            self._entries.remove_tensors({entry: head})

    def abort(self, sample_id: str) -> None:
        """Fail a put of the sample that is under way, and void its leases, so that releasing them frees nothing.

        What is published stays, and can be read again.
        """
        with self._lock:
            self._aborts[sample_key(sample_id)] += 1
            self._leases.void(sample_id)

    def gc(self) -> int:
        """Drop old leases; remove what was freed under Mooncake's lease, and tensors that belong to no sample."""
        with self._lock:
            self._leases.expire()
        return self._entries.frees.retry() + self._entries.sweep()

    def health(self) -> dict[str, Any]:
        with self._lock:
            leases = len(self._leases)
        return {**self._entries.health(), "leases": leases, "retain_on_release": self.retain_on_release}

    def estimate_bytes(self, ref: SampleRef) -> int:
        return sum(spec.nbytes for spec in ref.feature_specs.values())

    def reconnect(self) -> None:
        """Use a store that was started again at the same address. What it held before is lost."""
        with self._lock:
            self._leases = LeaseTable(self._leases.max_hold_age_s)
        self._entries.reconnect()

    def close(self) -> None:
        """Leave the store; what is in it stays there."""
        self._entries.close()
        if self._owned_client is not None:
            self._owned_client.close()

    def _parse_keys(self, ref: SampleRef) -> dict[str, ObjectKey]:
        """Return the keys of a ref by feature, which are of one generation of its sample in this store."""
        if ref.feature_store_uri != self.uri:
            found = ref.feature_store_uri or "of nobody"
            raise StoreError(f"sample {ref.sample_id} is in the store {found}, expected {self.uri}")
        parsed = {name: ObjectKey.parse(key, self._address.store_id) for name, key in ref.feature_keys.items()}
        places = {name: key for name, key in parsed.items() if key is not None}
        entry = sample_key(ref.sample_id)
        if (
            len(places) != len(parsed)
            or len({key.generation for key in places.values()}) != 1
            or {key.entry for key in places.values()} != {entry}
        ):
            raise StoreError(
                f"sample {ref.sample_id}: expected feature keys of one generation of this sample, "
                f"{self._address.store_id}/{entry}/g<generation>/<feature>, found {sorted(ref.feature_keys.values())}"
            )
        return places

    def _try_read(self, ref: SampleRef, place: ObjectKey, names: Mapping[str, str]) -> dict[str, Tensor] | None:
        """Read a sample in one call, as its ref says that it is; None if it is not so."""
        specs = {name: ref.feature_specs.get(name) for name in names}
        sizes = {names[name]: spec.nbytes for name, spec in specs.items() if spec is not None}
        if len(sizes) != len(names):
            return None
        found = self._entries.try_read(place.entry, place.generation, sizes)
        if found is None:
            return None
        tensors = dict(zip(names, found, strict=True))
        found_as = {name: (tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors.items()}
        expected = {name: (tuple(spec.shape), spec.dtype) for name, spec in specs.items() if spec is not None}
        return tensors if found_as == expected else None

    def _require_head(self, ref: SampleRef, place: ObjectKey) -> Head:
        heads = self._entries.read_heads([place.entry])
        head = heads.get(place.entry)
        if head is None or head.generation != place.generation:
            raise StoreError(self._describe_absent(ref, place, heads))
        return head

    def _describe_absent(self, ref: SampleRef, place: ObjectKey, heads: Mapping[str, Head]) -> str:
        where = f"sample {ref.sample_id}: generation {place.generation} in {self.uri}"
        if place.entry in heads:
            newest = heads[place.entry].generation
            return f"{where} is superseded by generation {newest}. Use the ref that this put returned"
        return f"{where} is gone: released for the last time. Put it again"


def _require_agreement(ref: SampleRef, head: Head, names: Mapping[str, str]) -> None:
    """Raise StoreError unless the sample has the ref's features in their shapes and dtypes."""
    for name, stored in names.items():
        record = head.tensors.get(stored)
        where = f"sample {ref.sample_id}, feature {name}"
        if record is None:
            raise StoreError(f"{where}: the sample has no feature {stored}, it has {sorted(head.tensors)}")
        require_spec(ref.feature_specs.get(name), record.shape, record.dtype, where)
