"""The operations of a decoder layer on one sequence, written as their formulas, rotary frequencies from a config included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.export.readers.reader import CONFIG, ExportFolder


@dataclass(frozen=True)
class RopeTable:
    """Inverse frequencies (head_dim / 2,) float64, and the factor `scaling` on cosines and sines."""

    inverse: Tensor
    scaling: float = 1.0


def read_rope(folder: ExportFolder, section: str, head_dim: int) -> RopeTable:
    """Return the table of `rope_parameters` (transformers 5), else of `rope_theta` and `rope_scaling` (transformers 4).

    Raises:
        StoreError: no theta, an unknown rope_type, or a parameter of that type is missing.
    """
    old = {
        "rope_theta": folder.find_setting(f"{section}rope_theta"),
        **folder.find_setting(f"{section}rope_scaling", {}),
    }
    found = folder.find_setting(f"{section}rope_parameters", old)
    rope = {name: value for name, value in found.items() if value is not None}
    try:
        return make_rope_table(rope, head_dim)
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{folder.path / CONFIG}: {section}rope_parameters: expected rope_theta and the parameters of one of "
            f"{', '.join(_KINDS)}, found {rope} ({error})"
        ) from error


def make_rope_table(rope: Mapping[str, Any], head_dim: int) -> RopeTable:
    """Return the table of parameters in the spelling of transformers. Raises KeyError for one that is missing."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return _KINDS[kind](rope, _compute_frequencies(float(rope["rope_theta"]), head_dim))


def _compute_frequencies(theta: float, head_dim: int) -> Tensor:
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _keep(_: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    return RopeTable(inverse)


def _scale_linear(rope: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    return RopeTable(inverse / rope["factor"])


def _scale_llama3(rope: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    """Scale as Llama 3.1: divide low frequencies by `factor`, keep high ones, and interpolate linearly between them."""
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return RopeTable(kept * inverse + (1 - kept) * inverse / rope["factor"])


def _scale_yarn(rope: Mapping[str, Any], inverse: Tensor) -> RopeTable:
    """Scale by YaRN (arXiv 2309.00071, section 3.2), with the bounds and the attention factor of transformers."""
    factor, original, theta = rope["factor"], rope["original_max_position_embeddings"], rope["rope_theta"]
    count = 2 * len(inverse)

    def find_dimension(turns: float) -> float:
        return count * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = find_dimension(rope.get("beta_fast", 32)), find_dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, count - 1)
    ramp = (torch.arange(len(inverse), dtype=torch.float64) - first) / (last - first or 0.001)
    stretched = ramp.clamp(0, 1)
    return RopeTable(stretched * inverse / factor + (1 - stretched) * inverse, _scale_yarn_attention(rope, factor))


def _scale_yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


_KINDS = {"default": _keep, "linear": _scale_linear, "llama3": _scale_llama3, "yarn": _scale_yarn}

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight`, over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def gated_mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    """Return `down(silu(gate(x)) · up(x))` with the weights whose names begin with `prefix`."""
    gate, up = x @ weights[f"{prefix}gate_proj.weight"].T, x @ weights[f"{prefix}up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ weights[f"{prefix}down_proj.weight"].T


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Return (n, heads · D) as (heads, n, D)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(0, 1)


def rotate(heads: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
    """Rotate (heads, n, D) by `positions` (n,): component i is paired with component i + D/2 (as in Llama)."""
    angles = torch.outer(positions.double(), rope.inverse.to(positions.device))
    cos, sin = ((f * rope.scaling).to(heads.dtype) for f in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return softmax(QKᵀ / √D) V with a dense mask.

    Args:
        queries: (heads, n, D).
        keys, values: (key heads, m, D); each is shared by heads / key heads successive heads.
        visible: (n, m) bool.

    Returns:
        (n, heads · D).
    """
    group = queries.shape[0] // keys.shape[0]
    scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(queries.shape[-1])  # (heads, n, m)
    shares = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (shares @ values.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class LayerSizes:
    """Number of decoder layers, and the constants of each. They are explicit in an export: Llama's and Qwen3's defaults
    differ."""

    layers: int
    head_dim: int
    eps: float
    rope: RopeTable

    @classmethod
    def read(cls, folder: ExportFolder, section: str = "") -> LayerSizes:
        """Read the keys under the prefix `section`, which is empty or ends with a dot. Raises StoreError for a missing one."""
        head_dim = folder.require_setting(f"{section}head_dim")
        return cls(
            layers=folder.require_setting(f"{section}num_hidden_layers"),
            head_dim=head_dim,
            eps=folder.require_setting(f"{section}rms_norm_eps"),
            rope=read_rope(folder, section, head_dim),
        )
