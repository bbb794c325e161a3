"""Parts that travel through a Mooncake store: from an engine on another host, or into a store that is in Mooncake.

A part is an object `{request id}.{start}` of the store, a failure an object `{request id}.failed`; see
draftworks.features.mooncake_objects. The reader frees what it has read. Nothing is announced: an engine that answers has
a part on its way, and the reader waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import RLock

import torch

from draftworks.errors import PassingTroubleError, StoreLostError
from draftworks.features.mooncake_objects import MooncakeObjects
from draftworks.handover.spool import AnsweredRequest, Part, PartSink, PartSource, make_late_error, read_request_time
from draftworks.mooncake.address import MooncakeAddress, load_library
from draftworks.mooncake.client import MooncakeClient

PUT_TIMEOUT_S = 60.0
ABANDONED_S = 6 * 3600.0
_FIRST_POLL_S, _LONGEST_POLL_S, _LOOK_S = 0.002, 0.05, 1.0
_ROOM_SHARE = 4
_REASON = "reason"


class _Connection:
    """Objects of the store at an address file, connected to at the first use and again after the store was lost."""

    def __init__(self, address_file: Path) -> None:
        self._address_file = address_file
        self._objects: MooncakeObjects | None = None
        self._lock = RLock()

    def open(self) -> MooncakeObjects:
        with self._lock:
            if self._objects is None:
                client = MooncakeClient(MooncakeAddress.read(self._address_file))
                self._objects = MooncakeObjects(client, PUT_TIMEOUT_S)
            return self._objects

    def drop(self) -> None:
        with self._lock:
            self._objects = None


class MooncakeSink(PartSink):
    """Puts parts into the store at `address_file`. A full store makes `write` wait, and so the engine.

    Raises:
        ConfigError: Mooncake is not installed in this environment.
        StoreError: there is no address of a running service.
    """

    def __init__(self, address_file: Path) -> None:
        load_library(MooncakeAddress.read(address_file).timeout_s)
        self._connection = _Connection(address_file)

    def announce(self, request_id: str, start: int) -> None:
        pass

    def write(self, request_id: str, part: Part) -> None:
        self._put(f"{request_id}.{part.start}", part.list_tensors())

    def fail(self, request_id: str, reason: str) -> None:
        content = torch.frombuffer(bytearray(reason.encode() or b"unknown"), dtype=torch.uint8)
        self._put(_failed(request_id), {_REASON: content})

    def _put(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        try:
            self._connection.open().put(f"hidden states {name}", {name: tensors})
        except StoreLostError:
            self._connection.drop()
            raise


class MooncakeSource(PartSource):
    """Reads parts out of the store at `address_file`, each into one buffer, and frees them there."""

    def __init__(self, address_file: Path) -> None:
        self._connection = _Connection(address_file)
        self._taken: set[str] = set()

    def take(
        self, requests: Sequence[AnsweredRequest], timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> list[list[Part]]:
        try:
            objects = self._connection.open()
            self._await(objects, requests, timeout_s, look)
            parts = [self._read(objects, request) for request in requests]
        except StoreLostError:
            self._connection.drop()
            raise
        self._taken.update(request.request_id for request in requests)
        return [[part] for part in parts]

    def discard(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        left = sorted(ids - self._taken)
        self._taken -= ids
        if left:
            names = [name for request_id in left for name in (f"{request_id}.0", _failed(request_id))]
            self._connection.open().remove(names)

    def measure_room(self) -> int:
        """Return a quarter of the store's memory, in bytes: features may be there too."""
        return self._connection.open().owner.segment_bytes // _ROOM_SHARE

    def sweep(self, older_than_s: float = ABANDONED_S) -> None:
        """Remove old parts, whose readers were killed or had given up when they came."""
        objects, oldest = self._connection.open(), time.time() - older_than_s
        times = {name: read_request_time(name) for name in objects.list_names()}
        objects.remove([name for name, began in times.items() if began is not None and began < oldest])

    def _await(
        self, objects: MooncakeObjects, requests: Sequence[AnsweredRequest], timeout_s: float, look: Callable[[], None]
    ) -> None:
        began = looked = time.monotonic()
        poll_s, waiting = _FIRST_POLL_S, list(requests)
        while True:
            names = [name for each in waiting for name in (_first(each), _failed(each.request_id))]
            found = objects.find_existing(names)
            waiting = [each for each in waiting if found.isdisjoint((_first(each), _failed(each.request_id)))]
            if not waiting:
                return
            now = time.monotonic()
            if now - began > timeout_s:
                raise make_late_error(waiting[0].request_id, timeout_s)
            if now - looked > _LOOK_S:
                look()
                looked = now
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def _read(self, objects: MooncakeObjects, request: AnsweredRequest) -> Part:
        failed, first = _failed(request.request_id), _first(request)
        where = f"hidden states {first}"
        found = objects.read(where, {failed: None, first: None})
        if not found:
            raise PassingTroubleError(f"{where}: they were removed before they were read")
        objects.remove(list(found))
        if failed in found:
            reason = bytes(found[failed][_REASON].numpy()).decode(errors="replace")
            raise PassingTroubleError(f"the engine could not write hidden states: {reason}")
        return Part.from_tensors(request.cached_tokens, found[first])


def _first(request: AnsweredRequest) -> str:
    return f"{request.request_id}.{request.cached_tokens}"


def _failed(request_id: str) -> str:
    return f"{request_id}.failed"
