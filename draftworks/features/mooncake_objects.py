"""Objects of a Mooncake store: named tensors under one name, whole or absent, as a feature store and an engine's parts need.

An object `{store}/{name}` is hard-pinned and never changes: a head of `HEAD_BYTES`, then the tensors, each at a multiple
of `ALIGNMENT`. The head is a CRC in 8 hexadecimal digits and JSON, `[name, record]` for each tensor, filled up with
spaces. Mooncake shows an object when all of its bytes are there, so a killed writer leaves none.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from draftworks.errors import StoreError, StoreFullError, StoreLostError
from draftworks.features.store_parts import dtype_name
from draftworks.features.tensor_bytes import TensorRecord, align, compute_checksum, view_bytes
from draftworks.mooncake.address import Code, OwnerRecord, build_alive_key
from draftworks.mooncake.client import SLOWEST_BYTES_PER_S, MooncakeClient, Region

if TYPE_CHECKING:
    from torch import Tensor

HEAD_BYTES = 1024
_CRC_DIGITS = 8
_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.2
_TAKE_OVER_S = 2.0
_KEYS_AT_ONCE = 1000
_ATTEMPTS = 3


class MooncakeObjects:
    """Puts, reads and removes objects. Thread-safe; any number of processes may use one store.

    A dead owner of the memory or a dead master is a lost store: calls raise StoreLostError, within the address's timeout,
    until the service was started again and `reconnect` called.

    Args:
        put_timeout_s: seconds for which `put` waits for room in a full store; 0 refuses at once.
    """

    def __init__(self, client: MooncakeClient, put_timeout_s: float) -> None:
        self.client = client
        self.owner = client.read_owner()
        self._put_timeout_s = put_timeout_s
        self._prefix = f"{client.address.store_id}/"
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._putting = Lock()

    def reconnect(self) -> None:
        """Accept that the store was started again: what it held before is lost."""
        self.owner = self.client.read_owner()

    def require_alive(self) -> OwnerRecord:
        """Return the owner's record. Raises StoreLostError if owner or master is gone or was started again."""
        record = self.client.read_owner()
        if record.incarnation != self.owner.incarnation:
            raise StoreLostError(
                f"{self.client.where} was started again since it was opened: what it held before is lost. Call "
                "reconnect() to use the new one, and capture again"
            )
        return record

    def find_existing(self, names: Sequence[str]) -> set[str]:
        """Return those of the names that are stored."""
        self.require_alive()  # Mooncake says of everything that a dead owner held that it exists
        return self._ask_master(names)

    def list_names(self) -> list[str]:
        return [key.removeprefix(self._prefix) for key in self.client.list_keys(self.require_alive().metrics)]

    def put(self, where: str, objects: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Store objects; one that is stored already stays as it is.

        What another writer has begun is waited for, and taken over if it was killed: Mooncake's own put keeps what a name
        has, and gives 0 also where that is unfinished.

        Args:
            where: beginning of errors.

        Raises:
            StoreFullError: there was no room until the timeout; some of the objects may be stored.
        """
        stored = self._ask_master(list(objects))
        new = {name: tensors for name, tensors in objects.items() if name not in stored}
        if new:
            with self._putting:
                try:
                    self._put_all(where, self._pack_all(where, new))
                except StoreLostError:
                    self._staging = self._staging[:0].clone()  # a call without an answer may still read the other
                    raise

    def _put_all(self, where: str, waiting: dict[str, Tensor]) -> None:
        """Put objects, of bytes (N,) uint8, until all are there."""
        began = begun = time.monotonic()
        poll_s, take_over = _FIRST_POLL_S, False
        while waiting:
            codes = self._put_buffers(waiting, take_over)
            stored = self._ask_master(list(waiting))
            waiting = {name: buffer for name, buffer in waiting.items() if name not in stored}
            left = {codes[name] for name in waiting}
            if refused := left - {0, Code.NO_SPACE, Code.TAKEN_OVER}:
                raise StoreError(f"{where}: {self.client.where} refuses it with code {min(refused)}. See its logs")
            now, nbytes = time.monotonic(), sum(buffer.nbytes for buffer in waiting.values())
            if Code.NO_SPACE in left:
                self._require_hope(where, nbytes, now - began)
            if waiting:
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            take_over = now - begun > _TAKE_OVER_S + nbytes / SLOWEST_BYTES_PER_S
            begun = now if take_over else begun

    def read(self, where: str, sizes: Mapping[str, int | None]) -> dict[str, dict[str, Tensor]]:
        """Read those of the objects that are stored; return their tensors by the object's and the tensor's name.

        Args:
            where: beginning of errors.
            sizes: bytes of each object, see `measure`; of None the store is asked.

        Raises:
            StoreError: what is stored is not what was put.
        """
        found: dict[str, dict[str, Tensor]] = {}
        wanted, problems = dict(sizes), dict[str, str]()
        for _ in range(_ATTEMPTS):  # what is removed while it travels may arrive as another's bytes
            problems = {}
            for name, content, code in self._read_buffers(wanted):
                if code in (Code.ABSENT, Code.UNFINISHED):
                    continue
                try:
                    if code != len(content):
                        length = f"{code} bytes" if code >= 0 else f"code {code}"
                        raise ValueError(f"expected {len(content)} bytes, found {length}")
                    found[name] = _unpack(content)
                except ValueError as error:
                    problems[name] = str(error)
            wanted = dict.fromkeys(problems)
            if not wanted:
                break
        if len(found) + len(problems) < len(sizes):
            self.require_alive()  # in a store that is lost everything is absent
        for name, problem in problems.items():
            raise StoreError(f"{where}: {self._prefix}{name} is damaged: {problem}. Free it and capture again")
        return found

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects: they are absent for every process, and their memory is free at once; return the bytes.

        Nobody may be reading them, but for one who notices that their checksums are others.
        """
        keys, freed = [self._prefix + name for name in names], 0
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            sizes = self.client.sizes(some)
            codes = self.client.remove(some, force=True)
            freed += sum(size for size, code in zip(sizes, codes, strict=True) if code == 0 < size)
        return freed

    def health(self) -> dict[str, Any]:
        return {
            "master": self.client.address.master,
            "uri": self.client.address.uri,
            "segment_bytes": self.owner.segment_bytes,
            "lease_ttl_s": self.owner.lease_ttl_s,
        }

    def _ask_master(self, names: Sequence[str]) -> set[str]:
        """Return those of the names that the master has. Raises StoreLostError if it was started again."""
        found: set[str] = set()
        for start in range(0, len(names), _KEYS_AT_ONCE):
            some = names[start : start + _KEYS_AT_ONCE]
            alive = build_alive_key(self.client.address.store_id, self.owner.incarnation)
            same, *exist = self.client.exist([alive, *(self._prefix + name for name in some)])
            if not same:
                self.require_alive()
            found.update(name for name, exists in zip(some, exist, strict=True) if exists)
        return found

    def _require_hope(self, where: str, nbytes: int, waited_s: float) -> None:
        """Raise StoreFullError unless `nbytes` may find room yet."""
        segment = self.owner.segment_bytes
        if nbytes >= segment or waited_s >= self._put_timeout_s:
            raise StoreFullError(
                f"{where}: {self.client.where}, of {segment} bytes, has no room for {nbytes} bytes, after "
                f"{waited_s:.1f} s (put_timeout_s is {self._put_timeout_s:g}). Let consumers free, or start the service "
                "with a larger segment"
            )
        self.require_alive()  # a store without any owner says that it is full

    def _pack_all(self, where: str, objects: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the bytes (N,) uint8 of objects, in memory that is used again: fresh memory costs more than the copy."""
        sizes = {name: _measure(tensors) for name, tensors in objects.items()}
        total = sum(map(align, sizes.values()))
        if total > self._staging.nbytes:
            self._staging = torch.empty(total, dtype=torch.uint8)
        packed, start = dict[str, "Tensor"](), 0
        for name, size in sizes.items():
            packed[name] = self._staging[start : start + size]
            _pack(where, objects[name], packed[name])
            start += align(size)
        return packed

    def _put_buffers(self, buffers: Mapping[str, Tensor], take_over: bool) -> dict[str, int]:
        """Put objects, of bytes (N,) uint8; return a code for each."""
        regions = list(map(_region, buffers.values()))
        with self.client.registered(_region(self._staging)):
            codes = self.client.put([self._prefix + name for name in buffers], regions, replace=take_over)
        return dict(zip(buffers, codes, strict=True))

    def _read_buffers(self, sizes: Mapping[str, int | None]) -> list[tuple[str, Tensor, int]]:
        """Read objects side by side into one buffer; return name, bytes (N,) uint8 and code of each."""
        unknown = [name for name, size in sizes.items() if size is None]
        asked = dict(zip(unknown, self.client.sizes([self._prefix + name for name in unknown]), strict=True))
        lengths = {name: asked[name] if size is None else size for name, size in sizes.items()}
        lengths = {name: length for name, length in lengths.items() if length > 0}
        if not lengths:
            return []
        buffer, start = torch.empty(sum(map(align, lengths.values())), dtype=torch.uint8), 0
        contents: list[Tensor] = []
        for length in lengths.values():
            contents.append(buffer[start : start + length])
            start += align(length)
        with self.client.registered(_region(buffer)):
            codes = self.client.read([self._prefix + name for name in lengths], list(map(_region, contents)))
        return list(zip(lengths, contents, codes, strict=True))


def _region(buffer: Tensor) -> Region:
    return Region(buffer.data_ptr(), buffer.nbytes, buffer)


def measure(nbytes: int) -> int:
    """Return the bytes of an object with one tensor of `nbytes`."""
    return HEAD_BYTES + nbytes


def _measure(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of an object."""
    end = HEAD_BYTES
    for tensor in tensors.values():
        end = align(end) + tensor.nbytes
    return end


def _pack(where: str, tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Write an object's bytes to (N,) uint8, of `_measure`."""
    records, end = [], HEAD_BYTES
    for name, tensor in tensors.items():
        start = align(end)
        buffer[end:start] = 0
        end = start + tensor.nbytes
        content = buffer[start:end]
        content.copy_(view_bytes(tensor.detach().contiguous()))
        record = TensorRecord(dtype_name(tensor), tuple(tensor.shape), tensor.nbytes, compute_checksum(content))
        records.append([name, asdict(record)])
    head = json.dumps(records).encode().ljust(HEAD_BYTES - _CRC_DIGITS)
    if len(head) + _CRC_DIGITS > HEAD_BYTES:
        raise StoreError(f"{where}: {len(tensors)} features at once are more than the store can describe")
    buffer[:HEAD_BYTES] = torch.frombuffer(bytearray(_checksum(head) + head), dtype=torch.uint8)


def _unpack(content: Tensor) -> dict[str, Tensor]:
    """Return the tensors of an object, over its bytes (N,) uint8. Raises ValueError that says what is wrong with them."""
    head = content[:HEAD_BYTES].numpy().tobytes()
    if head[:_CRC_DIGITS] != _checksum(head[_CRC_DIGITS:]):
        raise ValueError("its head is altered")
    tensors, start = dict[str, "Tensor"](), HEAD_BYTES
    for name, fields in json.loads(head[_CRC_DIGITS:]):
        record = TensorRecord(**{**fields, "shape": tuple(fields["shape"])})
        part = content[align(start) : align(start) + record.nbytes]
        if len(part) != record.nbytes or compute_checksum(part) != record.checksum:
            raise ValueError(f"the checksum of {name} does not match")
        tensors[name] = record.restore(part)
        start = align(start) + record.nbytes
    return tensors


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)
