"""Removal of objects of a Mooncake store: at once, or when Mooncake's lease on them has run out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Event, RLock, Thread

from draftworks.errors import StoreError
from draftworks.mooncake.client import MooncakeClient
from draftworks.mooncake.library import Code

_KEYS_AT_ONCE = 1000
log = logging.getLogger(__name__)


class MooncakeFrees:
    """Removes objects, and those that are under lease later: nobody else would, and producers may wait for the room.

    Args:
        lease_ttl_s: seconds that a lease lasts; a thread tries again about as often while there is something left.
    """

    def __init__(self, client: MooncakeClient, lease_ttl_s: float) -> None:
        self._client = client
        self._interval_s = min(max(lease_ttl_s / 2, 0.05), 5.0)
        self._deferred: dict[str, int] = {}
        self._thread: Thread | None = None
        self._closing = Event()
        self._lock = RLock()

    @property
    def count(self) -> int:
        return len(self._deferred)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._deferred.values())

    def remove(self, sizes: Mapping[str, int], force: bool) -> int:
        """Remove objects, given with their sizes; return the bytes that are free already."""
        keys, freed = list(sizes), 0
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            codes = self._client.remove(some, force)
            with self._lock:
                for key, code in zip(some, codes, strict=True):
                    if code == Code.LEASED:
                        self._deferred[key] = sizes[key]
                    else:
                        self._deferred.pop(key, None)
                    freed += sizes[key] if code == 0 else 0
        self._retry_in_background()
        return freed

    def retry(self, force: bool = False) -> int:
        """Remove what was under lease; return the bytes that are free now.

        Args:
            force: also what is under lease still.
        """
        with self._lock:
            waiting = dict(self._deferred)
        return self.remove(waiting, force) if waiting else 0

    def forget(self) -> None:
        """Drop what waits: the store that held it is lost."""
        with self._lock:
            self._deferred.clear()

    def close(self) -> None:
        self._closing.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _retry_in_background(self) -> None:
        with self._lock:
            if not self._deferred or self._closing.is_set() or self._thread is not None:
                return
            self._thread = Thread(target=self._retry_until_done, name="mooncake-frees", daemon=True)
            self._thread.start()

    def _retry_until_done(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.retry()
            except StoreError as error:
                log.warning("what was freed waits no longer: %s", error)
                self.forget()
            with self._lock:
                if not self._deferred:
                    self._thread = None
                    return
