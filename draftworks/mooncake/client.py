"""Mooncake's store as one process uses it: raw buffers in and out, every wait bounded, a lost store told as such.

Mooncake itself waits 30 s for a process that is stopped, 90 s for a master that is absent when it is set up, goes on
saying that it is healthy when its master is dead, and that a key exists when its owner is.
"""

from __future__ import annotations

import ctypes
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock, Thread
from types import ModuleType
from typing import Any

from draftworks.errors import StoreError, StoreLostError
from draftworks.mooncake.address import Code, MooncakeAddress, OwnerRecord, build_owner_key, load_library

SLOWEST_BYTES_PER_S = 20e6
"""A call may take the address's timeout and the time that its bytes need at this rate."""
_LOCAL_BUFFER_BYTES = 16 << 20
_SETUP_ATTEMPTS = 20
MAX_SMALL_BYTES = 16 << 10
_LOST = {
    Code.TRANSFER_FAILED: "the process that owns its memory is dead or does not answer",
    Code.RPC_FAILED: "its master (mooncake_master) is dead or unreachable",
    Code.RPC_TIMEOUT: "its master (mooncake_master) does not answer",
}
_WHAT_TO_DO = "What it held is lost. Start the service again and capture again"


@dataclass(frozen=True)
class Region:
    """Memory that Mooncake reads or writes; `keeps` is the object that it belongs to."""

    pointer: int
    nbytes: int
    keeps: Any = field(repr=False, compare=False)


class MooncakeClient:
    """A connection to a store. Thread-safe.

    Args:
        segment_bytes: memory that this process gives to the store: 0 in all but the process that owns the memory.

    Raises:
        ConfigError: Mooncake is not installed.
        StoreLostError: the master cannot be reached within the address's timeout.
    """

    def __init__(self, address: MooncakeAddress, segment_bytes: int = 0) -> None:
        self.address = address
        library = load_library(address.timeout_s)
        self._pinned = library.ReplicateConfig()
        self._pinned.with_hard_pin = True  # otherwise Mooncake evicts what nobody has read yet, silently
        self._registered: dict[tuple[int, int], int] = {}
        self._lock = RLock()
        self._calls = 0
        self._closed = False
        self._library_store = self._set_up(library, segment_bytes)

    @property
    def where(self) -> str:
        return f"Mooncake store {self.address.store_id} (master {self.address.master})"

    def read_owner(self) -> OwnerRecord:
        """Read what the owner of the memory says of itself: the proof that owner and master live.

        Raises:
            StoreLostError: it cannot be read.
        """
        return self.parse_owner(self.read_small([build_owner_key(self.address.store_id)])[0])

    def parse_owner(self, content: bytes | None) -> OwnerRecord:
        """Return the record in the object at `build_owner_key`, None if it was absent.

        Raises:
            StoreLostError: it was absent.
        """
        if content is None:
            raise StoreLostError(
                f"{self.where} is lost: nobody owns its memory any more: the owner has ended or not answered for a "
                f"while, or the master was started again. {_WHAT_TO_DO}"
            )
        return OwnerRecord.from_bytes(content, self.where)

    def put(self, keys: Sequence[str], regions: Sequence[Region], replace: bool = True) -> list[int]:
        """Store an object per key, pinned; return a code for each. Regions should be registered.

        Args:
            replace: also where the key exists, or another writer is at it, who then gets TAKEN_OVER. Otherwise Mooncake
                keeps what a key has, and gives 0 also where that is unfinished, which nobody can read.
        """
        pointers, sizes = [region.pointer for region in regions], [region.nbytes for region in regions]
        put = self._library_store.batch_upsert_from if replace else self._library_store.batch_put_from
        return self._codes(put, list(keys), pointers, sizes, self._pinned, nbytes=sum(sizes), keeps=regions)

    def read(self, keys: Sequence[str], regions: Sequence[Region]) -> list[int]:
        """Read objects into regions; return the bytes of each, or a code. A lease that ran out is read again.

        A region longer than its object keeps its tail as it was: the caller has to compare lengths. Mooncake tells a
        lease that ran out after all bytes have travelled, so it has to last for the longest batch.

        Raises:
            StoreError: leases ran out again and again until the timeout.
        """
        codes = [int(Code.LEASE_EXPIRED)] * len(keys)
        deadline = time.monotonic() + self._limit_s(sum(region.nbytes for region in regions))
        while expired := [index for index, code in enumerate(codes) if code == Code.LEASE_EXPIRED]:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self.where}: the leases of {len(expired)} of {len(keys)} objects ran out while they were read, "
                    "each time. Start the service with a lease_ttl_s longer than the longest batch takes, or read less "
                    "at a time"
                )
            some = [regions[index] for index in expired]
            words = [keys[index] for index in expired], [r.pointer for r in some], [r.nbytes for r in some]
            new = self._codes(self._library_store.batch_get_into, *words, nbytes=sum(words[2]), keeps=some)
            for index, code in zip(expired, new, strict=True):
                codes[index] = code
        return codes

    def read_small(self, keys: Sequence[str], max_bytes: int = MAX_SMALL_BYTES) -> list[bytes | None]:
        """Read objects of at most `max_bytes`; None for those that do not exist, or are not finished."""
        whole = ctypes.create_string_buffer(max(1, max_bytes * len(keys)))
        start = ctypes.addressof(whole)
        with self.registered(Region(start, len(whole), whole)):
            lengths = self.read(keys, [Region(start + max_bytes * n, max_bytes, whole) for n in range(len(keys))])
        for key, length in zip(keys, lengths, strict=True):
            if length < 0 and length not in (Code.ABSENT, Code.UNFINISHED):
                raise StoreError(
                    f"{self.where}: {key} cannot be read: code {length}, at most {max_bytes} bytes expected"
                )
        read = memoryview(whole)
        found = [bytes(read[max_bytes * n : max_bytes * n + max(0, length)]) for n, length in enumerate(lengths)]
        return [None if length < 0 else content for length, content in zip(lengths, found, strict=True)]

    def put_small(self, contents: Mapping[str, bytes]) -> list[int]:
        """Store small objects, also where the key exists; return a code for each."""
        whole = b"".join(contents.values())
        buffer = ctypes.create_string_buffer(whole, max(1, len(whole)))
        regions, at = [], ctypes.addressof(buffer)
        for content in contents.values():
            regions.append(Region(at, len(content), buffer))
            at += len(content)
        with self.registered(Region(ctypes.addressof(buffer), len(buffer), buffer)):
            return self.put(list(contents), regions)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Whether the master knows each key. True also while a dead owner has not been noticed."""
        found = self._codes(self._library_store.batch_is_exist, list(keys)) if keys else []
        return [answer == 1 for answer in found]

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Return the bytes of each object, or a code."""
        return self._codes(lambda: list(map(self._library_store.get_size, keys))) if keys else []

    def remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove objects; return a code for each: LEASED where one was read or looked up lately, unless by `force`.

        Memory that is freed by force may be given to another object while somebody still reads.
        """
        return self._codes(self._library_store.batch_remove, list(keys), force) if keys else []

    def list_keys(self, metrics: str) -> list[str]:
        """Return the keys of this store as the master lists them at `metrics`, its HTTP server (`host:port`)."""
        try:
            with urllib.request.urlopen(f"http://{metrics}/get_all_keys", timeout=self.address.timeout_s) as answer:
                lines = answer.read().decode().splitlines()
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise StoreLostError(f"{self.where} is lost: {_LOST[Code.RPC_FAILED]}: {error}. {_WHAT_TO_DO}") from error
        return [line for line in lines if line.startswith(f"{self.address.store_id}/")]

    @contextmanager
    def registered(self, *regions: Region) -> Iterator[None]:
        """Register regions with Mooncake for the block, as RDMA requires; not those that overlap others'."""
        held = [region for region in regions if self.register(region)]
        try:
            yield
        finally:
            for region in held:
                self.unregister(region)

    def register(self, region: Region) -> bool:
        """Register a region, which may be registered already; False if it overlaps another one."""
        place = (region.pointer, region.nbytes)
        with self._lock:
            self._require_open()
            if place not in self._registered and self._library_store.register_buffer(*place) != 0:
                return False
            self._registered[place] = self._registered.get(place, 0) + 1
            return True

    def unregister(self, region: Region) -> None:
        place = (region.pointer, region.nbytes)
        with self._lock:
            self._registered[place] -= 1
            if not self._registered[place]:
                del self._registered[place]
                if not self._closed:
                    self._library_store.unregister_buffer(region.pointer)

    def close(self) -> None:
        """Leave the store. Calls of other threads come to their end first; later ones raise StoreLostError.

        The library ends the process by SIGSEGV where it is called, or is at work, after its `close`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            at_work = self._calls > 0
        if not at_work:
            self._bounded(self._library_store.close)

    def _set_up(self, library: ModuleType, segment_bytes: int) -> Any:
        """Return a store of the library, set up. It tries again, also because it may pick a port that is taken.

        Mooncake's own tries hold Python's global lock, 20 of them for 100 s at a master that has just died, so that the whole
        process stands still and nobody can give up: it makes one at a time.

        Raises:
            StoreLostError: see the class.
        """
        address, deadline, code = self.address, time.monotonic() + self.address.timeout_s, 0
        words = (segment_bytes, _LOCAL_BUFFER_BYTES, address.protocol, address.devices, address.master)
        for attempt in range(_SETUP_ATTEMPTS):
            self._require_listening()
            if attempt and time.monotonic() > deadline:
                break
            store = library.MooncakeDistributedStore()
            code = self._call(store.setup, address.host, "P2PHANDSHAKE", *words)
            if code == 0:
                return store
        raise StoreLostError(
            f"{self.where}: Mooncake refuses to be set up with a segment of {segment_bytes} bytes over "
            f"{address.protocol} (code {code}). See its log, and the memory that is free"
        )

    def _require_listening(self) -> None:
        host, _, port = self.address.master.rpartition(":")
        try:
            socket.create_connection((host, int(port)), self.address.timeout_s).close()
        except OSError as error:
            raise StoreLostError(
                f"{self.where} is lost: {_LOST[Code.RPC_FAILED]}: {error}. Start its service, or correct the address"
            ) from error

    def _codes(self, function: Callable[..., Any], *arguments: Any, nbytes: int = 0, keeps: Any = None) -> list[int]:
        """Call the library and return its codes.

        A call that fails to reach a master that listens is made once more: its connection was one to a master of before.

        Raises:
            StoreLostError: a code says that owner or master is gone, or there is no answer in time.
        """
        codes = list(self._call(function, *arguments, nbytes=nbytes, keeps=keeps))
        if Code.RPC_FAILED in codes:
            self._require_listening()
            codes = list(self._call(function, *arguments, nbytes=nbytes, keeps=keeps))
        for code in codes:
            if code in _LOST:
                raise StoreLostError(f"{self.where} is lost: {_LOST[Code(code)]} (code {code}). {_WHAT_TO_DO}")
        return codes

    def _limit_s(self, nbytes: int) -> float:
        return self.address.timeout_s + nbytes / SLOWEST_BYTES_PER_S

    def _call(self, function: Callable[..., Any], *arguments: Any, nbytes: int = 0, keeps: Any = None) -> Any:
        """Call the library and return its answer; see `_bounded`.

        Raises:
            StoreLostError: no answer in time, or this connection is closed.
        """
        with self._lock:
            self._require_open()
            self._calls += 1

        def call() -> Any:
            try:
                return function(*arguments)
            finally:
                self._end_call()

        return self._bounded(call, nbytes=nbytes, keeps=keeps)

    def _end_call(self) -> None:
        """Count a call as ended; the last one of a connection that is closed meanwhile closes the library's."""
        with self._lock:
            self._calls -= 1
            last = self._closed and not self._calls
        if last:
            self._library_store.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreLostError(f"{self.where}: this connection was closed meanwhile")

    def _bounded(self, function: Callable[[], Any], nbytes: int = 0, keeps: Any = None) -> Any:
        """Call a function and return its answer.

        The call runs in a thread that is left behind if there is no answer in time; `keeps` lives as long as it.

        Raises:
            StoreLostError: no answer in time.
        """
        done: Future[Any] = Future()

        def work(_keeps: Any = keeps) -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        Thread(target=work, name="mooncake-call", daemon=True).start()
        limit = self._limit_s(nbytes)
        try:
            return done.result(limit)
        except TimeoutError:
            raise StoreLostError(
                f"{self.where} has not answered for {limit:.0f} s (timeout_s is {self.address.timeout_s:g}): its master or the "
                f"process that owns its memory is stopped, dead or unreachable. {_WHAT_TO_DO}"
            ) from None
