"""The operations of a decoder layer on one sequence, written as their formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from draftworks.export.readers.rope import RopeTable

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
