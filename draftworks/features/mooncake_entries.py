"""Entries of a Mooncake store: what both of its feature stores put, read and free.

An entry is a sample, or one feature of a content-keyed store. Its tensors are objects `{store}/{entry}/g{generation}/
{name}` that never change. Which generation is the entry's, and what its tensors are, is in the small object
`{store}/{entry}/head`, written after them: so an entry is complete or absent, also when its writer is killed, and every
process sees at once when it is superseded or freed, although Mooncake keeps the memory of what was read lately until a
lease has run out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

from draftworks.errors import StoreError, StoreFullError, StoreLostError
from draftworks.features.mooncake_frees import MooncakeFrees
from draftworks.features.mooncake_head import Head, ObjectKey
from draftworks.features.tensor_bytes import TensorRecord, align, compute_checksum, view_bytes
from draftworks.mooncake.address import OwnerRecord, build_alive_key
from draftworks.mooncake.client import MAX_SMALL_BYTES, MooncakeClient, Region
from draftworks.mooncake.library import Code

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.2
_HEADS_AT_ONCE = 256
_KEYS_AT_ONCE = 1000
_HEAD_ATTEMPTS = 3


@dataclass(frozen=True)
class _NewEntry:
    head: Head
    content: bytes
    contents: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Place:
    """Where in a buffer a tensor is read to."""

    entry: str
    generation: int
    name: str
    record: TensorRecord
    start: int


class MooncakeEntries:
    """Puts, reads and frees entries. Thread-safe; any number of processes may use one store.

    Args:
        put_timeout_s: seconds for which `put` waits for room in a full store; 0 refuses at once.
        sole_reader: nobody reads what this object frees, so that its memory is free at once. Otherwise what was read
            lately is freed when Mooncake's lease on it has run out.
        orphan_age_s: tensors put longer ago that no head names count as left by a crashed process.
    """

    def __init__(
        self, client: MooncakeClient, put_timeout_s: float, sole_reader: bool, orphan_age_s: float = 3600.0
    ) -> None:
        self.client = client
        self.owner = client.read_owner()
        self.frees = MooncakeFrees(client, self.owner.lease_ttl_s)
        self._put_timeout_s = put_timeout_s
        self._sole_reader = sole_reader
        self._orphan_age_s = orphan_age_s
        self._store_id = client.address.store_id

    def reconnect(self) -> None:
        """Accept that the store was started again: what it held before is lost."""
        self.frees.forget()
        self.owner = self.client.read_owner()

    def close(self) -> None:
        """End the retries of `frees`. What still waits is found by `sweep` of another process."""
        self.frees.close()

    def require_alive(self) -> OwnerRecord:
        """Return the owner's record. Raises StoreLostError if owner or master is gone or was started again."""
        return self._require_same(self.client.read_owner())

    def tensor_key(self, entry: str, generation: int, name: str) -> str:
        return f"{self._store_id}/{entry}/g{generation}/{quote(name, safe='')}"

    def find_existing(self, entries: Sequence[str]) -> set[str]:
        """Return those of the entries that are stored."""
        self.require_alive()  # Mooncake says of everything that a dead owner held that it exists
        return self._ask_master(entries)

    def read_heads(self, entries: Iterable[str]) -> dict[str, Head]:
        """Return the heads of those of the entries that are stored."""
        heads: dict[str, Head] = {}
        wanted = list(dict.fromkeys(entries))
        for start in range(0, len(wanted), _HEADS_AT_ONCE):
            heads.update(self._read_some_heads(wanted[start : start + _HEADS_AT_ONCE]))
        return heads

    def read(self, where: str, wanted: Sequence[tuple[str, Head, str]]) -> list[Tensor] | None:
        """Read tensors, given by entry, head and name; None if one of the entries was superseded or freed meanwhile.

        The tensors share one buffer, which is theirs.

        Raises:
            StoreError: what is stored is not what was put.
        """
        plan, total = [], 0
        for entry, head, name in wanted:
            plan.append(_Place(entry, head.generation, name, head.tensors[name], total))
            total += align(head.tensors[name].nbytes)
        buffer = torch.empty(total, dtype=torch.uint8)
        for attempt in range(2):
            problem = self._read_into(buffer, plan)
            if problem is None:
                break
            now = self.read_heads(place.entry for place in plan)
            if any(place.entry not in now or now[place.entry].generation != place.generation for place in plan):
                return None
            if attempt:
                raise StoreError(f"{where}, {problem}")
        return [place.record.restore(buffer[place.start : place.start + place.record.nbytes]) for place in plan]

    def try_read(self, entry: str, generation: int, sizes: Mapping[str, int]) -> list[Tensor] | None:
        """Read tensors of known sizes in one call, with the head; None if they are not all that and of this generation."""
        starts, total = [], align(MAX_SMALL_BYTES)
        for nbytes in sizes.values():
            starts.append(total)
            total += align(nbytes)
        buffer = torch.empty(total, dtype=torch.uint8)
        origin, stored = buffer.data_ptr(), [index for index, nbytes in enumerate(sizes.values()) if nbytes]
        names, lengths = list(sizes), list(sizes.values())
        keys = [self._head_key(entry), *(self.tensor_key(entry, generation, names[index]) for index in stored)]
        regions = [Region(origin, MAX_SMALL_BYTES, buffer)]
        regions += [Region(origin + starts[index], lengths[index], buffer) for index in stored]
        with self.client.registered(Region(origin, buffer.nbytes, buffer)):
            head_length, *codes = self.client.read(keys, regions)
        head = Head.from_bytes(buffer[: max(0, head_length)].numpy().tobytes())
        if head is None or head.generation != generation or codes != [lengths[index] for index in stored]:
            return None
        found = []
        for name, nbytes, start in zip(names, lengths, starts, strict=True):
            record, content = head.tensors.get(name), buffer[start : start + nbytes]
            if record is None or record.nbytes != nbytes or record.checksum != compute_checksum(content):
                return None
            found.append(record.restore(content))
        return found

    def put(
        self,
        where: str,
        entries: Mapping[str, Mapping[str, Tensor]],
        supersede: bool,
        proceed: Callable[[], None] = lambda: None,
    ) -> dict[str, int]:
        """Store entries; return the generation of each that this call stored.

        Args:
            where: beginning of errors.
            supersede: replace entries that are stored; otherwise they stay as they are.
            proceed: called before entries are published; it may raise.

        Raises:
            StoreFullError: there was no room until the timeout.
        """
        stored = self._ask_master(list(entries))
        before = self.read_heads(stored) if stored and supersede else {}
        now = time.time_ns()
        new = {}
        for entry, tensors in entries.items():
            if entry in stored and not supersede:
                continue
            contents = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
            generation = max(now, before[entry].generation + 1) if entry in before else now
            head = Head(generation, {name: TensorRecord.of(tensor) for name, tensor in contents.items()})
            new[entry] = _NewEntry(head, head.to_bytes(where), contents)
        if new:
            self._put_when_there_is_room(where, new, bool(before), proceed)
        self.remove_tensors(before)
        return {entry: made.head.generation for entry, made in new.items()}

    def unpublish(self, entries: Iterable[str]) -> None:
        """Remove the heads of entries: they are absent for every process, and their tensors still there."""
        keys = [self._head_key(entry) for entry in entries]
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            self.client.remove(keys[start : start + _KEYS_AT_ONCE], force=True)

    def remove_tensors(self, heads: Mapping[str, Head], force: bool = False) -> int:
        """Free the memory of unpublished entries; return the bytes that are free already."""
        sizes = {
            self.tensor_key(entry, head.generation, name): record.nbytes
            for entry, head in heads.items()
            for name, record in head.tensors.items()
            if record.nbytes
        }
        return self.frees.remove(sizes, force or self._sole_reader)

    def sweep(self) -> int:
        """Free tensors that no head names, as a crashed process leaves them; return the bytes."""
        listed = [ObjectKey.parse(key, self._store_id) for key in self.client.list_keys(self.require_alive().metrics)]
        oldest = time.time_ns() - int(self._orphan_age_s * 1e9)
        old = [key for key in listed if key is not None and key.generation < oldest]
        heads = self.read_heads(key.entry for key in old)
        orphans = [key for key in old if key.entry not in heads or heads[key.entry].generation != key.generation]
        keys = [f"{self._store_id}/{key.entry}/g{key.generation}/{key.name}" for key in orphans]
        return self.frees.remove({key: max(0, self.client.size(key)) for key in keys}, force=True)

    def health(self) -> dict[str, Any]:
        keys = self.client.list_keys(self.require_alive().metrics)
        return {
            "master": self.client.address.master,
            "uri": self.client.address.uri,
            "segment_bytes": self.owner.segment_bytes,
            "lease_ttl_s": self.owner.lease_ttl_s,
            "entries": sum(key.endswith("/head") for key in keys),
            "tensors": sum(ObjectKey.parse(key, self._store_id) is not None for key in keys),
            "deferred": self.frees.count,
            "deferred_bytes": self.frees.nbytes,
        }

    def _head_key(self, entry: str) -> str:
        return f"{self._store_id}/{entry}/head"

    def _ask_master(self, entries: Sequence[str]) -> set[str]:
        """Return those of the entries of which the master has a head. Raises StoreLostError if it was started again."""
        found: set[str] = set()
        for start in range(0, len(entries), _KEYS_AT_ONCE):
            some = entries[start : start + _KEYS_AT_ONCE]
            alive = build_alive_key(self._store_id, self.owner.incarnation)
            same, *exist = self.client.exist([alive, *map(self._head_key, some)])
            if not same:
                self.require_alive()
            found.update(entry for entry, exists in zip(some, exist, strict=True) if exists)
        return found

    def _require_same(self, record: OwnerRecord) -> OwnerRecord:
        if record.incarnation != self.owner.incarnation:
            raise StoreLostError(
                f"{self.client.where} was started again since it was opened: what it held before is lost. Call "
                "reconnect() to use the new one, and capture again"
            )
        return record

    def _read_some_heads(self, entries: Sequence[str]) -> dict[str, Head]:
        heads: dict[str, Head] = {}
        absent, remaining = False, list(entries)
        for _ in range(_HEAD_ATTEMPTS):
            damaged = []
            contents = self.client.read_small(list(map(self._head_key, remaining)))
            for entry, content in zip(remaining, contents, strict=True):
                head = None if content is None else Head.from_bytes(content)
                absent = absent or content is None
                if head is not None:
                    heads[entry] = head
                elif content is not None:
                    damaged.append(entry)
            remaining = damaged
            if not remaining:
                break
        if absent:
            self.require_alive()  # in a store that is lost everything is absent
        if remaining:
            raise StoreError(f"{self.client.where}: {self._head_key(remaining[0])} is damaged. Start the service again")
        return heads

    def _read_into(self, buffer: Tensor, plan: Sequence[_Place]) -> str | None:
        """Read tensors to their places in a buffer; return what is wrong with one of them."""
        stored = [place for place in plan if place.record.nbytes]
        if not stored:
            return None
        origin = buffer.data_ptr()
        with self.client.registered(Region(origin, buffer.nbytes, buffer)):
            codes = self.client.read(
                [self.tensor_key(place.entry, place.generation, place.name) for place in stored],
                [Region(origin + place.start, place.record.nbytes, buffer) for place in stored],
            )
        for place, code in zip(stored, codes, strict=True):
            nbytes = place.record.nbytes
            if code in (Code.ABSENT, Code.UNFINISHED):
                return f"feature {place.name}: its bytes are gone. Capture it again"
            if code != nbytes:
                found = f"{code} bytes" if code >= 0 else f"code {code}"
                return f"feature {place.name}: expected {nbytes} bytes, found {found}: it is truncated or replaced"
            if compute_checksum(buffer[place.start : place.start + nbytes]) != place.record.checksum:
                return f"feature {place.name}: the checksum does not match: it is altered. Free it and capture again"
        return None

    def _put_when_there_is_room(
        self, where: str, new: Mapping[str, _NewEntry], supersede: bool, proceed: Callable[[], None]
    ) -> None:
        together = not supersede
        began, poll_s = time.monotonic(), _FIRST_POLL_S
        while not self._publish(where, new, together, proceed):
            together = False
            if self.frees.retry():
                continue
            needed, segment = sum(made.head.nbytes for made in new.values()), self.owner.segment_bytes
            waited = time.monotonic() - began
            if needed >= segment or waited >= self._put_timeout_s:
                raise StoreFullError(
                    f"{where}: {self.client.where}, of {segment} bytes, has no room for {needed} bytes, after "
                    f"{waited:.1f} s (put_timeout_s is {self._put_timeout_s:g}). Let consumers release, or start the "
                    "service with a larger segment"
                )
            self.require_alive()  # a store without any owner says that it is full
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def _publish(self, where: str, new: Mapping[str, _NewEntry], together: bool, proceed: Callable[[], None]) -> bool:
        """Put tensors and heads; False if there is no room, and then nothing of it is left.

        Args:
            together: put both in one call, which Mooncake completes in order. Meanwhile heads of before are not there, and
                a store that turns out to be full shows the new ones for a moment.
        """
        contents = {
            self.tensor_key(entry, made.head.generation, name): view_bytes(tensor)
            for entry, made in new.items()
            for name, tensor in made.contents.items()
            if tensor.nbytes
        }
        heads = {self._head_key(entry): made.content for entry, made in new.items()}
        codes: dict[str, int] = {}
        try:
            if together:
                buffers = {key: torch.frombuffer(bytearray(head), dtype=torch.uint8) for key, head in heads.items()}
                codes = self._put_buffers({**contents, **buffers})
                proceed()
            else:
                codes = self._put_buffers(contents)
                proceed()
                if not any(codes.values()):
                    codes |= dict(zip(heads, self.client.put_small(heads), strict=True))
            refused = [code for code in codes.values() if code not in (0, Code.NO_SPACE)]
            if refused:
                raise StoreError(f"{where}: {self.client.where} refuses it with code {refused[0]}. See its logs")
        except StoreLostError:
            raise
        except BaseException:
            self._take_back(new, codes)
            raise
        if any(codes.values()):
            self._take_back(new, codes)
            return False
        return True

    def _take_back(self, new: Mapping[str, _NewEntry], codes: Mapping[str, int]) -> None:
        self.unpublish(entry for entry in new if codes.get(self._head_key(entry)) == 0)
        self.remove_tensors({entry: made.head for entry, made in new.items()}, force=True)

    def _put_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, int]:
        """Put objects, of bytes (N,) uint8; return a code for each."""
        if not buffers:
            return {}
        held: list[Region] = []
        try:
            for buffer in buffers.values():
                region = Region(buffer.data_ptr(), buffer.nbytes, buffer)
                if not self.client.register(region):  # it overlaps what another tensor or thread is putting
                    buffer = buffer.clone()
                    region = Region(buffer.data_ptr(), buffer.nbytes, buffer)
                    if not self.client.register(region):
                        raise StoreError(f"{self.client.where}: {region.nbytes} bytes of memory cannot be registered")
                held.append(region)
            return dict(zip(buffers, self.client.put(list(buffers), held), strict=True))
        finally:
            for region in held:
                self.client.unregister(region)
