"""Translates tensor headers of a quantised checkpoint to those of the unquantised model, without loading weights.

Scales and zero points are left out; a packed weight gets the name of the weight that it encodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftworks.targets.safetensors_headers import TensorHeader

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
