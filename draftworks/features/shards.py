"""Shards: one self-describing safetensors file that holds the tensors of many samples, named by feature key.

The header's `__metadata__` carries the schema, a checksum per tensor, and the digest of the data section: the digest of
(key, dtype, shape, checksum) of every tensor in key order, which is also the file's name. So a shard is immutable,
equal content has equal names, and both a truncated file and a single altered sample are detected. The schema says which
hash the checksums are: XXH3 of 128 bits, in shards of before the start of a SHA-256.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from draftworks.errors import StoreError
from draftworks.features.store_parts import dtype_name
from draftworks.features.tensor_bytes import (
    DTYPE_NAMES,
    encode_safetensors_header,
    lay_out,
    require_code,
    sha256_of,
    view_buffer,
    xxh3_of,
)
from draftworks.storage.files import MAX_HEADER_BYTES, open_regular, parse_json, publish_file, require_file
from draftworks.storage.identity import digest

if TYPE_CHECKING:
    from torch import Tensor


class ShardBuffer:
    """Tensors in memory, by key, until they fill a shard.

    Args:
        shard_bytes: `full` is true from this size on.
        keep_tensors: keep the tensors that are added, which nobody changes afterwards, and not copies of them.
    """

    def __init__(self, shard_bytes: int, keep_tensors: bool = False) -> None:
        self._shard_bytes = shard_bytes
        self._keep_tensors = keep_tensors
        self._tensors: dict[str, Tensor] = {}
        self.nbytes = 0

    @property
    def full(self) -> bool:
        return self.nbytes >= self._shard_bytes

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors that were added and are not published yet, by key."""
        return self._tensors

    def add(self, key: str, tensor: Tensor) -> None:
        """Add a tensor under a key; a key that is present is ignored, since keys are content."""
        if key not in self._tensors:
            on_cpu = tensor.detach().cpu().contiguous()
            self._tensors[key] = on_cpu if self._keep_tensors else on_cpu.clone()
            self.nbytes += tensor.nbytes

    def discard(self, key: str) -> None:
        tensor = self._tensors.pop(key, None)
        self.nbytes -= 0 if tensor is None else tensor.nbytes

    def clear(self) -> None:
        """Forget all tensors: they are published."""
        self._tensors, self.nbytes = {}, 0


SHARD_SCHEMA = "draftworks.shard.2"
CHECKSUMS: Mapping[str, Callable[[Tensor], str]] = {
    "draftworks.shard.1": lambda tensor: sha256_of(tensor)[:16],
    SHARD_SCHEMA: xxh3_of,
}
"""The checksum of a tensor in hex, by the schema of its shard."""
ADVICE = "Delete this shard and capture again: only its samples will be captured."

_FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial process-id namespace: that of every Linux machine outside containers."""


@dataclass(frozen=True)
class ShardEntry:
    """The header's record of one tensor. `dtype` is torch's name, `checksum` hex, as in `CHECKSUMS`."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class ShardHeader:
    """A shard's header: `expected_bytes` is the required file length, `nbytes` the size of its tensors."""

    path: Path
    digest: str
    entries: Mapping[str, ShardEntry]
    expected_bytes: int
    schema: str = SHARD_SCHEMA

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def require_complete(self, key: str | None = None) -> None:
        """Raise StoreError if the file is shorter or longer than its header says."""
        found = self.path.stat().st_size
        if found != self.expected_bytes:
            sample = "" if key is None else f", needed for sample key {key}"
            raise StoreError(
                f"shard {self.path}{sample}, is truncated or has grown: expected {self.expected_bytes} bytes, "
                f"found {found}. {ADVICE}"
            )


def content_digest(entries: Mapping[str, ShardEntry]) -> str:
    """Return the digest of a shard's data section from its entries, in any order."""
    return digest([[k, e.dtype, list(e.shape), e.checksum] for k, e in sorted(entries.items())])


def read_header(path: Path) -> ShardHeader:
    """Read a shard's header alone, a few kilobytes.

    Raises:
        StoreError: the header cannot be read, is of another schema, or contradicts the file's name.
    """
    try:
        with open_regular(path) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"its header should be {length} bytes, the whole file has {path.stat().st_size}")
            fields = parse_json(stream.read(length))
        metadata = fields.pop("__metadata__")
        schema, recorded = metadata["schema"], metadata["digest"]
        checksums = parse_json(metadata["checksums"])
        entries = {key: _entry(value, checksums[key]) for key, value in fields.items()}
        end = max((value["data_offsets"][1] for value in fields.values()), default=0)
        held = content_digest(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise StoreError(
            f"shard {path} has no readable header ({error}); it is truncated or altered. {ADVICE}"
        ) from error
    if schema not in CHECKSUMS:
        raise StoreError(f"shard {path} has schema {schema!r}, expected one of {', '.join(CHECKSUMS)}")
    if recorded != path.stem or held != recorded:
        raise StoreError(
            f"shard {path} is altered: name, recorded digest {recorded} and header {content_digest(entries)} differ. "
            f"{ADVICE}"
        )
    return ShardHeader(path, recorded, entries, 8 + length + end, schema)


def describe_tensor(key: str, tensor: Tensor) -> ShardEntry:
    """Return the record of a contiguous tensor in main memory. Raises StoreError for a dtype that shards do not have."""
    require_code(dtype_name(tensor), f"key {key}")
    return ShardEntry(dtype_name(tensor), tuple(tensor.shape), tensor.nbytes, xxh3_of(tensor))


def encode_preamble(name: str, entries: Mapping[str, ShardEntry]) -> bytes:
    """Return what a shard begins with, its header included; the tensors follow one after the other, in this order."""
    metadata = {
        "schema": SHARD_SCHEMA,
        "digest": name,
        "checksums": json.dumps({key: entry.checksum for key, entry in entries.items()}),
    }
    return encode_safetensors_header(metadata, entries)


def _entry(value: dict[str, Any], checksum: str) -> ShardEntry:
    start, end = value["data_offsets"]
    return ShardEntry(DTYPE_NAMES[value["dtype"]], tuple(value["shape"]), end - start, checksum)


class ShardWriter(ShardBuffer):
    """Collects tensors in memory and publishes them as one shard.

    Args:
        folder: of the complete shards.
        staging: folder on the same file system for files being written.
        shard_bytes: `full` is true from this size on.
        publishing: context, given the shard's path, in which a written shard is renamed into place.
        keep_tensors: keep the tensors that are added, which nobody changes afterwards, and not copies of them.
    """

    def __init__(
        self,
        folder: Path,
        staging: Path,
        shard_bytes: int,
        publishing: Callable[[Path], AbstractContextManager[None]] = nullcontext,
        keep_tensors: bool = False,
    ) -> None:
        super().__init__(shard_bytes, keep_tensors)
        self._folder = folder
        self._staging = staging
        self._publishing = publishing

    def publish(self) -> ShardHeader | None:
        """Write to staging, fsync, rename; None if there is nothing to write. The writer is empty afterwards.

        Raises:
            StoreError: the disk refuses; nothing is left behind, and the writer keeps its tensors.
        """
        if not self.tensors:
            return None
        tensors = lay_out(self.tensors)
        entries = {key: describe_tensor(key, tensor) for key, tensor in tensors.items()}
        name = content_digest(entries)
        final = self._folder / f"{name}.safetensors"
        try:
            with ExitStack() as until_renamed, publish_file(final, self._staging / staging_name()) as staged:
                with staged.open("wb") as stream:
                    stream.write(encode_preamble(name, entries))
                    for tensor in tensors.values():
                        stream.write(view_buffer(tensor))
                until_renamed.enter_context(self._publishing(final))
        except OSError as error:
            raise StoreError(f"shard {final} ({self.nbytes:,} bytes) cannot be written: {error}") from error
        self.clear()
        return read_header(final)


class ShardReader:
    """Memory-mapped access to tensors of shards; the least recently used shards are closed.

    Args:
        max_open: shards kept mapped. Returned tensors stay valid after their shard is closed.
    """

    def __init__(self, max_open: int = 64) -> None:
        self._max_open = max_open
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._verified: defaultdict[Path, set[str]] = defaultdict(set)
        self._lock = Lock()

    def get(self, header: ShardHeader, key: str, verify: bool = True) -> Tensor:
        """Return the tensor of a key.

        Args:
            verify: compare its checksum on the first read; later epochs do not pay again.

        Raises:
            StoreError: the shard is gone or truncated, or (with `verify`) the tensor's bytes are not those stored.
        """
        with self._lock:
            handle = self._handle(header, key)
            tensor = handle.get_tensor(key)
        if verify and key not in self._verified[header.path]:
            found, expected = CHECKSUMS[header.schema](tensor), header.entries[key].checksum
            if found != expected:
                raise StoreError(
                    f"shard {header.path} is altered: sample key {key} has checksum {found}, expected {expected}. {ADVICE}"
                )
            self._verified[header.path].add(key)
        return tensor

    def forget(self, path: Path) -> None:
        """Close a shard that was removed, so that its bytes are free once nobody uses its tensors."""
        with self._lock:
            self._open.pop(path, None)
            self._verified.pop(path, None)

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    @property
    def open_shards(self) -> int:
        return len(self._open)

    def _handle(self, header: ShardHeader, key: str) -> Any:
        if header.path in self._open:
            self._open.move_to_end(header.path)
            return self._open[header.path]
        try:
            header.require_complete(key)
            handle = safe_open(require_file(header.path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise StoreError(f"shard {header.path}, needed for sample key {key}, cannot be opened: {error}") from error
        self._open[header.path] = handle
        while len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return handle


def process_table() -> str:
    """Return the scope of process ids: the host and, inside a container, its pid namespace."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = _FIRST_NAMESPACE
    host = socket.gethostname()
    return host if namespace == _FIRST_NAMESPACE else f"{host}+{namespace}"


def staging_name() -> str:
    """Return a staging file name with its writer for `gc`: process table, process id, and a unique part."""
    return f"{process_table()}~{os.getpid()}~{uuid.uuid4().hex[:12]}.tmp"


def staging_owner_is_dead(name: str) -> bool | None:
    """Whether the process that made a staging file is gone; None if it ran on another host."""
    host, _, rest = name.partition("~")
    pid = rest.partition("~")[0]
    if host != process_table() or not pid.isdigit():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class ShardIndex:
    """Index of the shards of a folder by key. Its store's lock protects it."""

    def __init__(self) -> None:
        self._headers: dict[Path, ShardHeader] = {}
        self._holders: dict[str, tuple[ShardHeader, ...]] = {}
        self._freed: dict[Path, frozenset[str]] = {}

    @property
    def headers(self) -> Collection[ShardHeader]:
        return self._headers.values()

    @property
    def paths(self) -> set[Path]:
        return set(self._headers)

    @property
    def freed(self) -> dict[Path, frozenset[str]]:
        """The freed keys of the shards that have some."""
        return self._freed

    @property
    def num_keys(self) -> int:
        return len(self._holders)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, freed ones too: their shards are still there."""
        return sum(header.nbytes for header in self.headers)

    @property
    def freed_bytes(self) -> int:
        return sum(self._headers[path].entries[key].nbytes for path, keys in self._freed.items() for key in keys)

    def find(self, path: Path) -> ShardHeader | None:
        """Return the header of a shard; None if it is not known."""
        return self._headers.get(path)

    def holders(self, key: str) -> tuple[ShardHeader, ...]:
        """Return the shards that hold a key, the first known first; several where processes stored it at one time."""
        return self._holders.get(key, ())

    def add(self, header: ShardHeader, freed: Collection[str] = ()) -> None:
        """Add a shard, or what is known of it again, of whose keys those in `freed` do not count."""
        self._headers[header.path] = header
        alone, freed = (header,), header.entries.keys() & freed
        for key in header.entries:
            others = self._others(key, header.path)
            if key not in freed:
                self._holders[key] = (*others, header) if others else alone
            elif others:
                self._holders[key] = others
            else:
                self._holders.pop(key, None)
        self._freed.pop(header.path, None)
        if freed:
            self._freed[header.path] = frozenset(freed)

    def remove(self, path: Path) -> None:
        """Forget a shard that is gone."""
        header = self._headers[path]
        self.add(header, header.entries)
        del self._headers[path]
        self._freed.pop(path, None)

    def find_emptied(self, path: Path) -> ShardHeader | None:
        """Return the header of a shard whose keys are all freed; None if it holds any, or is not known."""
        header = self._headers.get(path)
        return None if header is None or len(self._freed.get(path, ())) < len(header.entries) else header

    def _others(self, key: str, path: Path) -> tuple[ShardHeader, ...]:
        holders = self._holders.get(key, ())
        return tuple(other for other in holders if other.path != path) if holders else holders
