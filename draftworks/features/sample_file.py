"""A sample in one safetensors file with its identity and a seal in the header.

The header's `__metadata__` has two entries: `record`, JSON with the sample's id, its generation and for each tensor
dtype, shape and SHA-256; and `seal`, computed over all bytes of the header with the seal's own digits as zeros. So any
altered byte is detected, and with a shared secret nobody else can write a file that is accepted.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.sealing import AuthPolicy
from draftworks.storage.identity import canonical_json
from draftworks.storage.regular_files import parse_json

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_SCHEMA = "draftworks.sample.1"
MAX_HEADER_BYTES = 64 << 20
_BLANK = b"0" * 64
# Quotes inside a JSON string are escaped, so neither a sample id nor a tensor name can contain this pattern.
_SEAL = re.compile(rb'"seal":"([0-9a-f]{64})"')


@dataclass(frozen=True)
class TensorRecord:
    """The record of one tensor in a sample file: torch dtype name, shape, SHA-256 of its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class SampleHeader:
    """The verified header of a sample file; `spans` are the byte ranges of the tensors."""

    path: Path
    sample_id: str
    generation: int
    tensors: Mapping[str, TensorRecord]
    spans: Mapping[str, slice]


def write_sample(
    path: Path, sample_id: str, generation: int, tensors: Mapping[str, Tensor], policy: AuthPolicy
) -> None:
    """Write a sample file at `path`; syncing and publishing are the store's part."""
    from safetensors.torch import save_file

    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    record = {
        "schema": SAMPLE_SCHEMA,
        "sample_id": sample_id,
        "generation": generation,
        "sealed_by": policy.kind,
        "tensors": {
            name: asdict(TensorRecord(str(t.dtype).removeprefix("torch."), tuple(t.shape), _sha256(t)))
            for name, t in own.items()
        },
    }
    save_file(own, path, metadata={"record": canonical_json(record), "seal": _BLANK.decode()})
    with path.open("r+b") as stream:
        header = _header_bytes(stream)
        place = _SEAL.search(header)
        if place is None:
            raise StoreError(f"{path}: safetensors wrote a header without the seal's place")
        stream.seek(8 + place.start(1))
        stream.write(policy.seal(header).encode())


def read_sample_header(stream: BufferedReader, path: Path, policy: AuthPolicy) -> SampleHeader:
    """Read and verify the header of an open sample file, and the file's length.

    Raises:
        StoreError: truncated, altered, of another schema, or not sealed as `policy` requires.
    """
    try:
        header = _header_bytes(stream)
        fields = parse_json(header)
        record = parse_json(fields.pop("__metadata__")["record"])
        seal = _SEAL.search(header)
        if seal is None:
            raise ValueError("it has no seal")
        blank = header[: seal.start(1)] + _BLANK + header[seal.end(1) :]
        policy.require(str(record["sealed_by"]), seal[1].decode(), blank, str(path))
        found = _parsed(path, record, fields, data_start=8 + len(header))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise StoreError(f"{path} has no readable header ({error!r}): it is truncated or altered") from error
    expected = max((span.stop for span in found.spans.values()), default=8 + len(header))
    size = os.fstat(stream.fileno()).st_size
    if size != expected:
        raise StoreError(f"{path} is truncated or has grown: expected {expected} bytes, found {size}")
    return found


def read_tensor(stream: BufferedReader, header: SampleHeader, name: str) -> Tensor:
    """Read a tensor into memory of its own: a mapped file may vanish when another machine frees it.

    Raises:
        StoreError: its bytes are not those that were stored.
    """
    import torch

    record, span = header.tensors[name], header.spans[name]
    content = bytearray(span.stop - span.start)
    stream.seek(span.start)
    read = stream.readinto(content)
    found = sha256(content).hexdigest()
    if read != len(content) or found != record.sha256:
        raise StoreError(
            f"{header.path}, tensor {name}, is altered: expected checksum {record.sha256[:16]}, found {found[:16]}"
        )
    dtype = getattr(torch, record.dtype)
    if not content:
        return torch.empty(record.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(record.shape)


def _parsed(path: Path, record: dict[str, Any], fields: dict[str, Any], data_start: int) -> SampleHeader:
    if record["schema"] != SAMPLE_SCHEMA:
        raise StoreError(f"{path} has schema {record['schema']!r}, expected {SAMPLE_SCHEMA!r}")
    tensors = {
        name: TensorRecord(value["dtype"], tuple(value["shape"]), value["sha256"])
        for name, value in record["tensors"].items()
    }
    offsets = {name: fields[name]["data_offsets"] for name in tensors}
    spans = {name: slice(data_start + first, data_start + last) for name, (first, last) in offsets.items()}
    return SampleHeader(path, record["sample_id"], record["generation"], tensors, spans)


def _header_bytes(stream: BufferedIOBase) -> bytes:
    stream.seek(0)
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header should be {length} bytes, the most allowed is {MAX_HEADER_BYTES}")
    header = stream.read(length)
    if len(header) != length:
        raise ValueError(f"its header should be {length} bytes, the file has {len(header)} of them")
    return header


def _sha256(tensor: Tensor) -> str:
    import torch

    return sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
