"""Features in Mooncake under their content keys: from a producer's memory to a trainer's without a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from draftworks.errors import ConfigError, StoreError, StoreLostError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef
from draftworks.features.mooncake_objects import MooncakeObjects, measure
from draftworks.features.sample_folder import sample_key
from draftworks.features.store_parts import LeaseTable, dtype_name, fill_in_ref, require_spec
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = "feature"
"""Name of the one tensor of an object."""
POLL_S = 0.2
_Result = TypeVar("_Result")
log = logging.getLogger(__name__)


class MooncakeFeatureStore(KeyedFeatureStore):
    """Features that any number of processes put, get and free, in the memory of a Mooncake service. Thread-safe.

    A key is stored once, by the first process that puts it, and stays until it is freed, when it is missing for every
    process and its memory free at once. Tensors are copies, valid beyond their lease.

    A call that finds the store lost waits until its service runs again, and is made once more: what was lost is then
    missing, as what was freed is.

    Args:
        address_file: of a `MooncakeService`, which may start later.
        timeout_s: how long a store that does not run is waited for.
        put_timeout_s: how long `put` waits for room; 0 refuses at once.
        max_hold_age_s: leases older than this are dropped by `gc`.
        connect: makes the connection to an address.

    Raises:
        ConfigError: Mooncake is not installed.
        StoreLostError: the service has not started within `timeout_s`. Calls raise it too.
    """

    lease_bound = False

    def __init__(
        self,
        address_file: Path,
        timeout_s: float,
        put_timeout_s: float = 60.0,
        max_hold_age_s: float = 3600.0,
        connect: Callable[[MooncakeAddress], MooncakeClient] = MooncakeClient,
    ) -> None:
        self._address_file = address_file
        self._timeout_s = timeout_s
        self._put_timeout_s = put_timeout_s
        self._connect = connect
        self._leases = LeaseTable(max_hold_age_s)
        self._lock = RLock()
        self._losses = 0
        self._objects: MooncakeObjects | None = None
        self._wait_for_service()

    @property
    def uri(self) -> str:
        assert self._objects is not None
        return self._objects.client.address.uri

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """Publish tensors by feature name. A key that is stored already is not stored again.

        Raises:
            StoreFullError: there was no room until the timeout; some of the features may be stored.
        """
        contents = {_name(ref.feature_keys[name]): {FEATURE: tensor} for name, tensor in tensors.items()}
        self._call(lambda objects: objects.put(f"sample {ref.sample_id}", contents))
        return fill_in_ref(ref, tensors, self.uri)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        specs = {name: ref.feature_specs.get(name) for name in ref.feature_keys}
        sizes = {
            _name(key): None if (spec := specs[name]) is None else measure(spec.nbytes)
            for name, key in ref.feature_keys.items()
        }
        found = self._call(lambda objects: objects.read(f"sample {ref.sample_id}", sizes))
        tensors: dict[str, Tensor] = {}
        for name, key in ref.feature_keys.items():
            where = f"sample {ref.sample_id}, feature {name}"
            if _name(key) not in found:
                raise StoreError(
                    f"{where}: key {key} is not in the feature store {self.uri}. Capture the features again: only what is "
                    "missing will be captured"
                )
            tensors[name] = found[_name(key)][FEATURE]
            require_spec(specs[name], tuple(tensors[name].shape), dtype_name(tensors[name]), where)
        with self._lock:
            return tensors, self._leases.grant(ref.sample_id)

    def release(self, handle: FeatureHandle) -> None:
        with self._lock:
            self._leases.end(handle)

    def abort(self, sample_id: str) -> None:
        """Void the sample's leases. `put` buffers nothing that could be discarded."""
        with self._lock:
            self._leases.void(sample_id)

    def free(self, keys: Iterable[str]) -> int:
        names = [_name(key) for key in keys]
        return self._call(lambda objects: objects.remove(names))

    def gc(self) -> int:
        """Drop old leases; killed processes leave nothing."""
        with self._lock:
            self._leases.expire()
        return 0

    def health(self) -> dict[str, Any]:
        def look(objects: MooncakeObjects) -> dict[str, Any]:
            return {**objects.health(), "features": sum(map(_is_feature, objects.list_names()))}

        return {**self._call(look), "leases": len(self._leases), "losses": self._losses}

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys not stored, in the order given."""
        wanted = list(keys)
        found = self._call(lambda objects: objects.find_existing([_name(key) for key in wanted]))
        return [key for key in wanted if _name(key) not in found]

    def refresh(self) -> None:
        """No-op: `find_missing` caches nothing."""

    def flush(self) -> None:
        """No-op: `put` buffers nothing."""

    def close(self) -> None:
        """Leave the store; what is in it stays there."""
        with self._lock:
            if self._objects is not None:
                with suppress(StoreError):
                    self._objects.client.close()

    def _call(self, action: Callable[[MooncakeObjects], _Result]) -> _Result:
        deadline, opened = time.monotonic() + self._timeout_s, False
        while True:
            objects, losses = self._objects, self._losses
            assert objects is not None
            try:
                return action(objects)
            except StoreLostError as error:
                if opened and time.monotonic() > deadline:
                    raise
                with self._lock:
                    if losses == self._losses:  # else another thread was here already
                        log.warning("%s", error)
                        self._wait_for_service()
                        self._losses += 1
                opened = True

    def _wait_for_service(self) -> None:
        """Open the store that the address file names, or accept that the one that is open was started again."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            late = time.monotonic() > deadline  # an attempt may take long, and end with another address in the file
            try:
                return self._open()
            except ConfigError:
                raise
            except StoreError as error:
                if late:
                    raise StoreLostError(
                        f"the Mooncake store at {self._address_file} does not run, and was not started within "
                        f"{self._timeout_s:g} s: {error}"
                    ) from error
            time.sleep(POLL_S)

    def _open(self) -> None:
        address = MooncakeAddress.read(self._address_file)
        if self._objects is not None and address == self._objects.client.address:
            self._objects.reconnect()
            return
        opened = MooncakeObjects(self._connect(address), self._put_timeout_s)
        self.close()
        self._objects = opened


def _name(key: str) -> str:
    """Return the name of a feature's object: no key, however hostile, is part of it."""
    return f"k{sample_key(key)}"


def _is_feature(name: str) -> bool:
    return len(name) == 33 and name[0] == "k"
