"""Headers of a quantised checkpoint as those of the plain one: scales left out, packed weights under the name they stand for."""

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
"""Types of weights that are several to an element, so that the shape is not the weight's."""
UNKNOWN = (0,)
"""Shape of a tensor whose own cannot be told from its header."""


@dataclass(frozen=True)
class PlainHeaders:
    """Tensors as a model without quantisation would have them; `note` says what of them is unknown."""

    tensors: Mapping[str, TensorHeader] = field(repr=False)
    unshaped: frozenset[str] = frozenset()
    note: str | None = None


@dataclass(frozen=True)
class _PlainTensor:
    """The plain tensor that a stored one stands for."""

    name: str
    header: TensorHeader


def strip_quantization(tensors: Mapping[str, TensorHeader], config: Any) -> PlainHeaders:
    """Translate names and shapes of a quantised checkpoint; those of another one are given back as they are.

    Knows block scales (fp8, DeepSeek's layout), MXFP4 (gpt-oss), compressed-tensors, GPTQ, AWQ, ModelOpt and
    bitsandbytes. What it does not know stays, and is unexpected then.

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
        experts, rows, groups, nbytes = header.shape  # two values of 4 bits a byte, of the transposed matrix
        return _PlainTensor(name.removesuffix("_blocks"), replace(header, shape=(experts, groups * nbytes * 2, rows)))
    for suffix in _PACKED:
        if name.endswith(suffix):
            return _PlainTensor(f"{name.removesuffix(suffix)}.weight", replace(header, shape=UNKNOWN))
    return _PlainTensor(name, replace(header, shape=UNKNOWN) if header.dtype in _CODES else header)


def _is_auxiliary(name: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Whether it is a scale or the like, of a weight that is there."""
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
