"""Parts that travel through a Mooncake store: from an engine on another host, or into a store that is in Mooncake.

A part is an entry `{request id}.{start}` of the store, a failure an entry `{request id}.failed`; see
draftworks.features.mooncake_entries. The reader frees what it has read. Nothing is announced: an engine that answers has
a part on its way, and the reader waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import RLock

import torch

from draftworks.errors import PassingTroubleError, StoreLostError
from draftworks.features.mooncake_entries import MooncakeEntries
from draftworks.features.mooncake_head import ObjectKey
from draftworks.mooncake.address import MooncakeAddress
from draftworks.mooncake.client import MooncakeClient
from draftworks.mooncake.library import load_library
from draftworks.sglang.parts import AnsweredRequest, Part, PartSink, PartSource, is_captured, make_late_error

PUT_TIMEOUT_S = 60.0
ABANDONED_S = 6 * 3600.0
_FIRST_POLL_S, _LONGEST_POLL_S, _LOOK_S = 0.002, 0.05, 1.0
_ROOM_SHARE = 4
_REASON = "reason"


class _Connection:
    """Entries of the store at an address file, connected to at the first use and again after the store was lost."""

    def __init__(self, address_file: Path) -> None:
        self._address_file = address_file
        self._entries: MooncakeEntries | None = None
        self._lock = RLock()

    def open(self) -> MooncakeEntries:
        with self._lock:
            if self._entries is None:
                client = MooncakeClient(MooncakeAddress.read(self._address_file))
                self._entries = MooncakeEntries(client, PUT_TIMEOUT_S, sole_reader=True)
            return self._entries

    def drop(self) -> None:
        with self._lock:
            self._entries = None


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

    def _put(self, entry: str, tensors: dict[str, torch.Tensor]) -> None:
        try:
            self._connection.open().put(f"hidden states {entry}", {entry: tensors}, supersede=False)
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
            entries = self._connection.open()
            self._await(entries, requests, timeout_s, look)
            parts = [self._read(entries, request) for request in requests]
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
            self._remove(entry for request_id in left for entry in (f"{request_id}.0", _failed(request_id)))

    def measure_room(self) -> int:
        """Return a quarter of the store's memory, in bytes: features may be there too."""
        return self._connection.open().owner.segment_bytes // _ROOM_SHARE

    def sweep(self, older_than_s: float = ABANDONED_S) -> None:
        """Remove old parts, whose readers were killed or had given up when they came."""
        entries = self._connection.open()
        address, metrics = entries.client.address, entries.owner.metrics
        listed = [ObjectKey.parse(key, address.store_id) for key in entries.client.list_keys(metrics)]
        oldest = time.time_ns() - int(older_than_s * 1e9)
        old = {key.entry for key in listed if key and is_captured(key.entry) and key.generation < oldest}
        self._remove(old)

    def _await(
        self, entries: MooncakeEntries, requests: Sequence[AnsweredRequest], timeout_s: float, look: Callable[[], None]
    ) -> None:
        began = looked = time.monotonic()
        poll_s, waiting = _FIRST_POLL_S, list(requests)
        while True:
            names = [name for each in waiting for name in (_first(each), _failed(each.request_id))]
            found = entries.find_existing(names)
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

    def _read(self, entries: MooncakeEntries, request: AnsweredRequest) -> Part:
        failed, entry = _failed(request.request_id), _first(request)
        heads = entries.read_heads([failed, entry])
        name = failed if failed in heads else entry
        tensors = list(heads[name].tensors) if name in heads else []
        where = f"hidden states {name}"
        found = entries.read(where, [(name, heads[name], each) for each in tensors]) if tensors else None
        if found is None:
            raise PassingTroubleError(f"{where}: they were removed before they were read")
        entries.unpublish(heads)
        entries.remove_tensors(heads, force=True)
        if name == failed:
            reason = bytes(found[0].numpy()).decode(errors="replace")
            raise PassingTroubleError(f"the engine could not write hidden states: {reason}")
        return Part.from_tensors(request.cached_tokens, dict(zip(tensors, found, strict=True)))

    def _remove(self, names: Iterable[str]) -> None:
        entries = self._connection.open()
        heads = entries.read_heads(names)
        entries.unpublish(heads)
        entries.remove_tensors(heads, force=True)


def _first(request: AnsweredRequest) -> str:
    return f"{request.request_id}.{request.cached_tokens}"


def _failed(request_id: str) -> str:
    return f"{request_id}.failed"
