"""Names, dtypes and shapes of a model's tensors, quantized ones included, from its files' headers. Torch-free."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from draftworks.config.capture import find_quantizing_args
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import open_regular, parse_json, read_json
from draftworks.storage.hub import fetch_hub_file, fetch_hub_header
from draftworks.storage.words import list_names

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """The files of a target in its directory or on the hub; a hub file is downloaded on the first request for it."""

    target: TargetFiles

    @property
    def where(self) -> str:
        """Name, path or hub id, and commit of the target, for messages."""
        at = "" if self.target.revision is None else f" at commit {self.target.revision}"
        return f"target {self.target.name}: {self.target.model}{at}"

    def require_folder(self) -> None:
        """Raise ConfigError if the target has no revision (so it must be a directory) and that directory is absent."""
        if self.target.revision is None and not Path(self.target.model).is_dir():
            raise ConfigError(
                f"{self.where}: no such directory. Correct `model`, or give the `revision` (commit) of a hub id."
            )

    def find_file(self, filename: str) -> Path | None:
        """Return the local path of a file; None if the target has no such file."""
        if self.target.revision is not None:
            return fetch_hub_file(f"target {self.target.name}", self.target.model, self.target.revision, filename)
        path = Path(self.target.model) / filename
        return path if path.is_file() else None

    def require_file(self, filename: str) -> Path:
        """Return the local path of a file of weights. Raises StoreError if the target has no such file."""
        path = self.find_file(filename)
        if path is None:
            raise StoreError(f"{self.where}: {filename} is missing; weights must be safetensors")
        return path

    def read_index(self) -> dict[str, str] | None:
        """Return the file name of each tensor from the index; None without an index.

        Raises:
            StoreError: the index is not JSON, or does not map tensors to names of files in the same folder.
        """
        path = self.find_file(INDEX)
        if path is None:
            return None
        try:
            weight_map = read_json(path)["weight_map"]
            plain = all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{path}: not a safetensors index: {error!r}. Copy or download it again") from error
        if not plain:
            raise StoreError(f"{path}: not a safetensors index: expected names of files in the same folder")
        return dict(weight_map)


_MODEL_OPT = "hf_quant_config.json"
_LOADED_IN = {"load_in_4bit", "load_in_8bit"}
"""Keys by which older checkpoints of bitsandbytes are known."""


def explain_unprobable(target: TargetFiles, engine_args: Sequence[str]) -> str:
    """Return why an engine cannot be compared with the target's files; an empty text if it can."""
    quantizing = find_quantizing_args(engine_args)
    if quantizing:
        return f"capture.server.args has {', '.join(quantizing)}, which changes the numerical results"
    method = read_quantization(target)
    return f"the checkpoint is quantised ({method}), and its layers are not run here" if method else ""


def read_quantization(target: TargetFiles) -> str:
    """Return the name of the checkpoint's quantisation, as its files give it; empty without one.

    NVIDIA's ModelOpt writes a file of its own beside config.json.
    """
    path = Path(target.model) / "config.json"
    if target.revision is not None:
        path = fetch_hub_file(f"target {target.name}", target.model, target.revision, "config.json") or path
    try:
        config = read_json(path)
    except (OSError, ValueError):
        return ""  # building the model from this file raises an error that names the problem
    if not isinstance(config, dict):
        return ""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if isinstance(found, dict):
        return str(found.get("quant_method", "bitsandbytes" if _LOADED_IN & found.keys() else "quantization_config"))
    return "modelopt" if target.revision is None and (path.parent / _MODEL_OPT).is_file() else ""


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
            f"{files.where}: {len(elsewhere)} tensors are in {WEIGHTS}, and by the index in other files too, such as "
            f"{index[elsewhere[0]]}. Remove {WEIGHTS}, or the index and its files"
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
                f"{self.where}: {INDEX} names {len(found)} files, and {len(absent)} of them are absent, such as "
                f"{absent[0]}. {remedy}"
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


_PACKED = (".qweight", ".weight_packed")
_BESIDE_PACKED = (".qzeros", ".scales", ".g_idx", ".weight_shape", ".weight_g_idx")
_BESIDE = (
    *("_scale_inv", "_scale", "_scale_2", "_scales", "_zero_point", "_g_idx", "_global_scale"),
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4"),
    *(".quant_state.bitsandbytes__fp4", ".SCB", ".weight_format"),
)
_MODULE_SCALES = (
    ".input_scale",
    ".activation_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".SCB",
    ".weight_format",
)
_CODES = {"U8", "U16", "U32", "I16", "I32", "F4", "F6_E2M3", "F6_E3M2"}
"""Dtypes of packed weights: one stored element holds several weights, so the stored shape is not the weight's."""
UNKNOWN = (0,)
"""Placeholder shape of a tensor whose real shape cannot be derived from its header."""


@dataclass(frozen=True)
class PlainHeaders:
    """Tensor headers as the model without quantisation would have them.

    Attributes:
        unshaped: names of the tensors whose shape is `UNKNOWN`.
        note: a sentence about the tensors whose shape is unknown; None if every shape is known.
    """

    tensors: Mapping[str, TensorHeader] = field(repr=False)
    unshaped: frozenset[str] = frozenset()
    note: str | None = None


@dataclass(frozen=True)
class _PlainTensor:
    """Name and header of the unquantised tensor that a stored tensor encodes."""

    name: str
    header: TensorHeader


def strip_quantization(tensors: Mapping[str, TensorHeader], config: Any) -> PlainHeaders:
    """Translate names and shapes of a quantised checkpoint; return those of an unquantised one unchanged.

    Supports block scales (fp8, DeepSeek's layout), MXFP4 (gpt-oss), compressed-tensors, GPTQ, AWQ, ModelOpt and
    bitsandbytes. A tensor of an unsupported layout keeps its name, so the later check reports it as unexpected.

    Args:
        config: `quantization_config` of the target, or None.
    """
    if config is None:
        return PlainHeaders(tensors)
    plain: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        if not _is_auxiliary(name, tensors):
            stands_for = _to_plain(name, header, tensors)
            plain[stands_for.name] = stands_for.header
    unshaped = frozenset(name for name, header in plain.items() if header.shape == UNKNOWN)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    note = f"the weights are quantised ({method}): {len(unshaped)} packed ones were checked by name, not by shape"
    return PlainHeaders(plain, unshaped, note if unshaped else None)


def _to_plain(name: str, header: TensorHeader, tensors: Mapping[str, TensorHeader]) -> _PlainTensor:
    if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors and len(header.shape) == 4:
        experts, rows, groups, nbytes = header.shape  # (E, out, G, B): two 4-bit values a byte, transposed matrix
        return _PlainTensor(name.removesuffix("_blocks"), replace(header, shape=(experts, groups * nbytes * 2, rows)))
    for suffix in _PACKED:
        if name.endswith(suffix):
            return _PlainTensor(f"{name.removesuffix(suffix)}.weight", replace(header, shape=UNKNOWN))
    return _PlainTensor(name, replace(header, shape=UNKNOWN) if header.dtype in _CODES else header)


def _is_auxiliary(name: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Whether a tensor is a scale, zero point or similar that belongs to a weight among `tensors`."""
    module = next((name.removesuffix(suffix) for suffix in _BESIDE_PACKED if name.endswith(suffix)), None)
    if module is not None:
        return any(f"{module}{packed}" in tensors for packed in _PACKED)
    if any(name.endswith(suffix) for suffix in _MODULE_SCALES):
        return True
    for suffix in _BESIDE:
        main = name.removesuffix(suffix)
        if main != name and any(other in tensors for other in (main, f"{main}_packed", f"{main}_blocks")):
            return True
    return False
