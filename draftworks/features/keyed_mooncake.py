"""Features in Mooncake under their content keys, whichever sample or process put them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import RLock
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef
from draftworks.features.leases import Lease, LeaseTable
from draftworks.features.mooncake_entries import MooncakeEntries
from draftworks.features.mooncake_head import Head
from draftworks.features.sample_folder import sample_key
from draftworks.features.specs import fill_in_ref, require_spec
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = "feature"


class KeyedMooncakeStore(KeyedFeatureStore):
    """A Mooncake store that several samples and strategies share by feature keys. Thread-safe.

    A key is stored once, by the first process that puts it, and stays until it is freed. What is freed is missing for
    every process at once; put again, it is another generation, so that what is left of the old one is never read.
    Tensors are copies in memory, valid beyond their lease.

    Args:
        address: of a `MooncakeService` that runs.
        put_timeout_s: seconds for which `put` waits for room in a full store; 0 refuses at once.
        sole_reader: no other process reads the keys that this one frees, so that their memory is free at once and not
            when Mooncake's lease has run out.
        max_hold_age_s: leases older than this are dropped by `gc`.
        orphan_age_s: tensors put longer ago that belong to no key are removed by `gc`.
        client: a connection to the same address that others use too; by default the store has its own.

    Raises:
        ConfigError: Mooncake is not installed.
        StoreLostError: nothing answers at the address.
    """

    lease_bound = False

    def __init__(
        self,
        address: MooncakeAddress,
        put_timeout_s: float = 60.0,
        sole_reader: bool = False,
        max_hold_age_s: float = 3600.0,
        orphan_age_s: float = 3600.0,
        client: MooncakeClient | None = None,
    ) -> None:
        self._address = address
        used = client or MooncakeClient(address)
        self._owned_client = used if client is None else None
        self._entries = MooncakeEntries(used, put_timeout_s, sole_reader, orphan_age_s)
        self._leases = LeaseTable(max_hold_age_s)
        self._freed_under_lease: dict[tuple[str, int], Head] = {}
        self._lock = RLock()

    @property
    def uri(self) -> str:
        return self._address.uri

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Publish tensors by feature name. A key that is stored already is not stored again.

        Raises:
            StoreFullError: there was no room until the timeout; some of the features may be stored.
        """
        entries = {_entry(ref.feature_keys[name]): {FEATURE: tensor} for name, tensor in tensors.items()}
        self._entries.put(f"sample {ref.sample_id}", entries, supersede=False)
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        entries = {name: _entry(key) for name, key in ref.feature_keys.items()}
        heads = self._entries.read_heads(entries.values())
        for name, entry in entries.items():
            if entry not in heads:
                raise StoreError(self._describe_absent(ref, name))
            record = heads[entry].tensors[FEATURE]
            where = f"sample {ref.sample_id}, feature {name}"
            require_spec(ref.feature_specs.get(name), record.shape, record.dtype, where)
        with self._lock:
            holds = [(entry, heads[entry].generation) for entry in entries.values()]
            handle = self._leases.grant(ref.sample_id, 0, holds)
        try:
            wanted = [(entry, heads[entry], FEATURE) for entry in entries.values()]
            found = self._entries.read(f"sample {ref.sample_id}", wanted)
            if found is None:
                raise StoreError(self._describe_absent(ref, " or ".join(entries)))
        except BaseException:
            self.release(handle)
            raise
        return dict(zip(entries, found, strict=True)), handle

    def release(self, handle: FeatureHandle) -> None:
        """Return the lease. The last one on a key that was freed meanwhile frees its memory."""
        with self._lock:
            lease = self._leases.end(handle)
        self._free_after([] if lease is None else [lease])

    def abort(self, sample_id: str) -> None:
        """Void the sample's leases. `put` buffers nothing that could be discarded."""
        with self._lock:
            leases = self._leases.void(sample_id)
        self._free_after(leases)

    def free(self, keys: Iterable[str]) -> int:
        heads = self._entries.read_heads(map(_entry, keys))
        self._entries.unpublish(heads)
        with self._lock:
            held = {entry: head for entry, head in heads.items() if self._leases.holds((entry, head.generation))}
            self._freed_under_lease |= {(entry, head.generation): head for entry, head in held.items()}
        return self._entries.remove_tensors({entry: head for entry, head in heads.items() if entry not in held})

    def gc(self) -> int:
        """Drop old leases; remove what was freed under lease, and tensors that belong to no key."""
        with self._lock:
            leases = self._leases.expire()
        return self._free_after(leases) + self._entries.frees.retry() + self._entries.sweep()

    def health(self) -> dict[str, Any]:
        with self._lock:
            return {**self._entries.health(), "leases": len(self._leases)}

    def estimate_bytes(self, ref: SampleRef) -> int:
        return sum(spec.nbytes for spec in ref.feature_specs.values())

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys not stored, in the order given. Raises StoreLostError if the store is lost."""
        keys = list(keys)
        found = self._entries.find_existing([_entry(key) for key in keys])
        return [key for key in keys if _entry(key) not in found]

    def refresh(self) -> None:
        """No-op: `find_missing` caches nothing."""

    def flush(self) -> None:
        """No-op: `put` buffers nothing."""

    def reconnect(self) -> None:
        """Use a store that was started again at the same address. What it held before is lost."""
        with self._lock:
            self._leases = LeaseTable(self._leases.max_hold_age_s)
            self._freed_under_lease.clear()
        self._entries.reconnect()

    def close(self) -> None:
        """Leave the store; what is in it stays there."""
        self._entries.close()
        if self._owned_client is not None:
            self._owned_client.close()

    def _free_after(self, ended: Iterable[Lease]) -> int:
        """Free what was freed under leases that have ended now; return the bytes."""
        with self._lock:
            held = {item for lease in ended for item in lease.holds}
            due = {
                at: head for at, head in self._freed_under_lease.items() if at in held and not self._leases.holds(at)
            }
            for at in due:
                del self._freed_under_lease[at]
        return sum(self._entries.remove_tensors({entry: head}) for (entry, _), head in due.items())

    def _describe_absent(self, ref: SampleRef, name: str) -> str:
        return (
            f"sample {ref.sample_id}, feature {name}: key {ref.feature_keys.get(name, '')} is not in the feature store "
            f"{self.uri}. Capture the features again: only what is missing will be captured"
        )


def _entry(key: str) -> str:
    return f"k{sample_key(key)}"
