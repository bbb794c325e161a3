"""Rotary frequencies from a config, worked out here rather than by the library that wrote or trained the draft."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftworks.export.readers.files import ExportFolder


@dataclass(frozen=True)
class RopeTable:
    """Inverse frequencies (head_dim / 2,) float64, and the factor on cosines and sines."""

    inverse: Tensor
    scaling: float = 1.0


def read_rope(folder: ExportFolder, section: str, head_dim: int) -> RopeTable:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4), or both, agreeing.

    Raises:
        StoreError: no rope, two that differ, or a kind that depends on the length of the sequence.
    """
    key = section + "rope_parameters"
    new, old = folder.optional(key, dict), _old_spelling(folder, section)
    if new is None and old is None:
        folder.refuse(key, "rope_type and rope_theta, here or as rope_theta and rope_scaling", "neither")
    if new is not None and old is not None and _plain(new) != _plain(old):
        folder.refuse(key, f"what rope_theta and rope_scaling say, {old}", str(new))
    rope = _plain(new or old or {})
    kind = rope.get("rope_type", "default")
    if "rope_theta" not in rope or kind not in _KINDS or rope.get("partial_rotary_factor", 1.0) != 1.0:
        folder.refuse(key, f"rope_theta, and one of {', '.join(_KINDS)} over the whole head", str(rope))
    try:
        return _KINDS[kind](rope, _unscaled(float(rope["rope_theta"]), head_dim))
    except KeyError as error:
        folder.refuse(key, f"{error} for rope_type {kind}", str(rope))


def _old_spelling(folder: ExportFolder, section: str) -> dict[str, Any] | None:
    theta = folder.optional(section + "rope_theta", (int, float))
    scaling = folder.optional(section + "rope_scaling", dict, {})
    return None if theta is None else {"rope_theta": theta, **scaling}


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says nothing: nulls, the default kind, the older name of the kind."""
    plain = {("rope_type" if name == "type" else name): value for name, value in rope.items() if value is not None}
    return {name: value for name, value in plain.items() if (name, value) != ("rope_type", "default")}


def _unscaled(theta: float, head_dim: int) -> Tensor:
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _default(_: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    return RopeTable(inverse)


def _linear(rope: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    return RopeTable(inverse / rope["factor"])


def _llama3(rope: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return RopeTable(kept * inverse + (1 - kept) * inverse / rope["factor"])


def _yarn(rope: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    """YaRN (arXiv 2309.00071, section 3.2) with the bounds and the attention factor of transformers."""
    factor, original, theta = rope["factor"], rope["original_max_position_embeddings"], rope["rope_theta"]
    count = 2 * len(inverse)

    def dimension(turns: float) -> float:
        return count * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, count - 1)
    ramp = (torch.arange(len(inverse), dtype=torch.float64) - first) / (last - first or 0.001)
    stretched = ramp.clamp(0, 1)
    return RopeTable(stretched * inverse / factor + (1 - stretched) * inverse, _yarn_attention(rope, factor))


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
