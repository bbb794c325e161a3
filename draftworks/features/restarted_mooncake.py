"""A Mooncake store that outlives its service: where that was started again, it goes on with the empty one."""

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
from draftworks.features.keyed_mooncake import KeyedMooncakeStore
from draftworks.mooncake.address import MooncakeAddress

if TYPE_CHECKING:
    from torch import Tensor

POLL_S = 0.2
_Result = TypeVar("_Result")
log = logging.getLogger(__name__)


class RestartedMooncakeStore(KeyedFeatureStore):
    """The `KeyedMooncakeStore` at an address file, for a stream of planned features. Thread-safe.

    A call that finds the store lost waits until its service runs again, and is made once more: what was lost is then
    missing, as what was freed is. Only one process frees features, and only those that nobody reads any more, so their
    memory is free at once.

    Args:
        address_file: of a `MooncakeService`, which may start later.
        timeout_s: how long a store that does not run is waited for.
        put_timeout_s: how long `put` waits for room.

    Raises:
        ConfigError: Mooncake is not installed.
        StoreLostError: the service has not started within `timeout_s`. Calls raise it too.
    """

    lease_bound = False

    def __init__(self, address_file: Path, timeout_s: float, put_timeout_s: float) -> None:
        self._address_file = address_file
        self._timeout_s = timeout_s
        self._put_timeout_s = put_timeout_s
        self._lock = RLock()
        self._losses = 0
        self._address: MooncakeAddress
        self._store: KeyedMooncakeStore | None = None
        self._wait_for_service()

    @property
    def uri(self) -> str:
        return self._address.uri

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        return self._call(lambda store: store.put(ref, tensors))

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        return self._call(lambda store: store.get(ref))

    def release(self, handle: FeatureHandle) -> None:
        self._call(lambda store: store.release(handle))

    def abort(self, sample_id: str) -> None:
        self._call(lambda store: store.abort(sample_id))

    def free(self, keys: Iterable[str]) -> int:
        freed = list(keys)
        return self._call(lambda store: store.free(freed))

    def gc(self) -> int:
        return self._call(lambda store: store.gc())

    def health(self) -> dict[str, Any]:
        return {**self._call(lambda store: store.health()), "losses": self._losses}

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        wanted = list(keys)
        return self._call(lambda store: store.find_missing(wanted))

    def refresh(self) -> None:
        """No-op: `find_missing` caches nothing."""

    def flush(self) -> None:
        """No-op: `put` buffers nothing."""

    def close(self) -> None:
        """Leave the store; what is in it stays there."""
        with self._lock:
            if self._store is not None:
                with suppress(StoreError):
                    self._store.close()

    def _call(self, action: Callable[[KeyedMooncakeStore], _Result]) -> _Result:
        deadline = time.monotonic() + self._timeout_s
        while True:
            store, losses = self._store, self._losses
            assert store is not None
            try:
                return action(store)
            except StoreLostError as error:
                if time.monotonic() > deadline:
                    raise
                with self._lock:
                    if losses == self._losses:  # else another thread was here already
                        log.warning("%s", error)
                        self._wait_for_service()
                        self._losses += 1

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
        if self._store is not None and address == self._address:
            self._store.reconnect()
            return
        opened = KeyedMooncakeStore(address, self._put_timeout_s, sole_reader=True)
        self.close()
        self._store, self._address = opened, address
