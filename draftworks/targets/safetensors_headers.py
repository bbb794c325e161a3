"""Reads names, dtypes and shapes of a model's tensors from safetensors headers, without the weights. Torch-free."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.hub import fetch_hub_header
from draftworks.storage.regular_files import open_regular, parse_json
from draftworks.storage.words import list_names
from draftworks.targets.model_files import INDEX, WEIGHTS, ModelFiles

MAX_HEADER_BYTES = 100_000_000
"""Limit for a header in bytes, the same as in the safetensors library."""
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("F4",), 4),
}
_SHOWN = 3

Found = TypeVar("Found")


@dataclass(frozen=True)
class TensorHeader:
    """A tensor's entry in a header. `dtype` is the safetensors name ("BF16"), `file` the name of the file."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class ModelHeaders:
    """All tensors that transformers loads for a model, by name, and tensors of the index that it does not load.

    Attributes:
        beside: tensors in the other files of the index if there is a complete `model.safetensors`: other engines read
            them, transformers does not.
    """

    tensors: Mapping[str, TensorHeader] = field(repr=False)
    beside: Mapping[str, TensorHeader] = field(default_factory=dict, repr=False)


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors in the header of one safetensors file, by name.

    Raises:
        StoreError: the file is not safetensors, is truncated, or describes tensors that it does not hold.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 1 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise _make_damage_error(
                    path, f"a file of {size} bytes whose first 8 bytes give a header length of {length}"
                )
            header = parse_json(stream.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise _make_damage_error(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(header, dict):
        raise _make_damage_error(path, "its header is not a JSON object")
    tensors = {name: _parse_tensor(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    _check_extent(path, header, size - 8 - length)
    return tensors


def read_model_headers(target: TargetFiles) -> ModelHeaders:
    """Return the headers of a target's weights, from a directory or a pinned commit of the hub.

    The choice of files is that of transformers: `model.safetensors` if it exists, else the files of the index.

    Raises:
        ConfigError: the hub cannot be reached.
        StoreError: there are no weights, a file that the index names is absent, a tensor is not in the file that the
            index names, a tensor is in several files, or a file is damaged.
    """
    files = _HeaderReader(target)
    unasked: list[ConfigError] = []

    def attempt(look: Callable[[], Found | None]) -> Found | None:
        """Return the result of `look`, or None if the hub cannot be reached.

        One of weights and index is enough, and without a network the cache holds only the one that exists.
        """
        try:
            return look()
        except ConfigError as error:
            unasked.append(error)
            return None

    whole = attempt(lambda: files.header(WEIGHTS))
    index = attempt(files.read_index)
    if index is None:
        if whole is not None:
            return ModelHeaders(whole)
        if unasked:
            raise unasked[0]
        raise StoreError(
            f"{files.where}: expected {WEIGHTS} or {INDEX}, found neither. Give a folder with safetensors weights"
        )
    shards = sorted(set(index.values()) - ({WEIGHTS} if whole is not None else set()))
    headers = files.headers(shards, beside_whole=whole is not None and index.keys() <= whole.keys())
    if whole is None:
        _check_index(files.where, index, headers)
        return ModelHeaders({name: tensor for header in headers.values() for name, tensor in header.items()})
    elsewhere = sorted(name for name, file in index.items() if file != WEIGHTS and name in whole)
    if elsewhere:
        raise StoreError(
            f"{files.where}: {len(elsewhere)} tensors are in {WEIGHTS}, and by {INDEX} in other files too, among them "
            f"{elsewhere[0]} in {index[elsewhere[0]]}: expected one file for each. Remove {WEIGHTS}, or the index and its files"
        )
    _check_index(files.where, index, {**headers, WEIGHTS: whole})
    return ModelHeaders(whole, {name: tensor for header in headers.values() for name, tensor in header.items()})


class _HeaderReader(ModelFiles):
    """Reads the headers of a target's files."""

    def header(self, filename: str) -> dict[str, TensorHeader] | None:
        """Return the header of a file, None if there is no such file. Only the header of a hub file is fetched."""
        target = self.target
        if target.revision is None:
            path = self.find_file(filename)
            return None if path is None else read_header(path)
        found = fetch_hub_header(f"target {target.name}", target.model, target.revision, filename)
        if found is None or isinstance(found, Path):
            return None if found is None else read_header(found)
        return {name: TensorHeader(dtype, shape, filename) for name, (dtype, shape) in found.items()}

    def headers(self, filenames: list[str], beside_whole: bool = False) -> dict[str, dict[str, TensorHeader]]:
        """Return the header of each file of the index.

        Args:
            beside_whole: whether model.safetensors has all tensors of the index, so that the index is not needed.

        Raises:
            StoreError: files are absent.
        """
        found = {name: self.header(name) for name in filenames}
        absent = [name for name, header in found.items() if header is None]
        if absent:
            remedy = "Copy or download the model again, all of its files"
            if beside_whole:
                remedy = f"{WEIGHTS} has all of its tensors: remove {INDEX}"
                remedy += f", and {list_names([name for name in found if found[name] is not None], _SHOWN)}" * (
                    len(absent) < len(found)
                )
            raise StoreError(
                f"{self.where}: {INDEX} names {len(found)} files, and {len(absent)} of them are absent: "
                f"{list_names(absent, _SHOWN)}. {remedy}"
            )
        return {name: header for name, header in found.items() if header is not None}


def _check_index(where: str, index: Mapping[str, str], headers: Mapping[str, Mapping[str, TensorHeader]]) -> None:
    """Raise StoreError unless each tensor of the index is in its file and no tensor is in two files."""
    astray = sorted(name for name, file in index.items() if name not in headers[file])
    if astray:
        raise StoreError(
            f"{where}: by {INDEX}, {len(astray)} tensors are in files that do not have them, among them {astray[0]} in "
            f"{index[astray[0]]}. Copy or download the model again, all of its files"
        )
    seen: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if name in seen:
                raise StoreError(
                    f"{where}: the tensor {name} is in {seen[name]} and in {file}: expected one file. Copy or download the "
                    "model again"
                )
            seen[name] = file


def _parse_tensor(path: Path, name: str, entry: Any) -> TensorHeader:
    try:
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
        bits = BITS.get(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise _make_damage_error(path, f"its header describes {name!r} by {entry!r:.80}") from error
    if not sound or (bits is not None and math.prod(shape) * bits != (end - begin) * 8):
        raise _make_damage_error(path, f"its header describes {name!r} by {entry!r:.80}")
    return TensorHeader(entry["dtype"], shape, path.name)


def _check_extent(path: Path, header: Mapping[str, Any], nbytes: int) -> None:
    spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
    end = 0
    for start, stop in spans:
        if start != end:
            raise _make_damage_error(
                path, f"its tensors leave out or share the bytes from {min(start, end)} to {max(start, end)}"
            )
        end = stop
    if end != nbytes:
        raise _make_damage_error(path, f"its header describes {end} bytes of tensors, the file has {nbytes}")


def _make_damage_error(path: Path, problem: str) -> StoreError:
    return StoreError(f"{path}: not a readable safetensors file: {problem}. Copy or download it again")
