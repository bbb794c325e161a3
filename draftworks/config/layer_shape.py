"""Default shape of a draft's layers, derived from the target's configuration, with replacements where it does not apply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftworks.config.layer_options import ROPE_KEYS

_FULL = "full_attention"
_THETA, _EPS = 10000.0, 1e-6
_IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Rope parameters that matter for images only: for text all position indices of a token are equal."""
_SCALED_EMBEDDINGS = ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text")
"""Model types whose embedding module multiplies its output by sqrt(hidden_size)."""


@dataclass(frozen=True)
class LayerShape:
    """Default sizes, norm epsilon and rotary parameters of a draft's layers.

    Attributes:
        rope: `rope_parameters` of transformers 5, of a type that drafts and servers can compute.
        own: one sentence, with the reason, for each value that differs from the target's.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Choice:
    """A value and the reason why it differs from the target's; None if it does not."""

    value: Any
    reason: str | None = None


def choose_layer_shape(config: Any) -> LayerShape:
    """Return the default layer shape for a target with this configuration (the text config of a multimodal wrapper)."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim, width, eps, rope = (
        _choose_head_dim(config),
        _choose_intermediate_size(config),
        _choose_norm_eps(config),
        choose_rope(config),
    )
    return LayerShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim.value,
        intermediate_size=width.value,
        rms_norm_eps=eps.value,
        rope=rope.value,
        own=tuple(choice.reason for choice in (rope, head_dim, width, eps) if choice.reason is not None),
    )


def find_embedding_scale(model_type: str | None, hidden_size: int) -> float:
    """Return the factor that a target of this (text) model type applies to embeddings before its first layer."""
    return math.sqrt(hidden_size) if model_type in _SCALED_EMBEDDINGS else 1.0


def choose_rope(config: Any) -> _Choice:
    """Return the target's rope parameters if a draft can compute them, else unscaled ones for the whole head, same base."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    reasons = []
    per_type = {name: rope for name, rope in found.items() if isinstance(rope, Mapping)}
    if per_type:
        chosen = _FULL if _FULL in per_type else next(iter(per_type))
        found = dict(per_type[chosen])
        reasons.append(f"that of {chosen} layers, since the target has one for each of {', '.join(per_type)}")
    partial = found.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        found = {
            name: value for name, value in found.items() if name not in ("partial_rotary_factor", *_IMAGE_ROPE_KEYS)
        }
        reasons.append(f"over whole heads, of which the target turns {partial:g}")
    if not found:
        return _Choice({"rope_type": "default", "rope_theta": _THETA}, f"rope: theta {_THETA:g}, the target has none")
    kind = found.get("rope_type", "default")
    if kind not in ROPE_KEYS or any(found.get(key) is None for key in ROPE_KEYS[kind]):
        found = {"rope_type": "default", "rope_theta": found.get("rope_theta") or _THETA}
        reasons.append(f"unscaled with theta {found['rope_theta']:g}, since drafts do not compute the target's {kind}")
    return _Choice(found, f"rope: {'; '.join(reasons)}" if reasons else None)


def _choose_head_dim(config: Any) -> _Choice:
    found = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if found % 2 == 0:
        return _Choice(found)
    return _Choice(found + 1, f"head_dim: {found + 1}, since rotary positions turn pairs and the target's is {found}")


def _choose_intermediate_size(config: Any) -> _Choice:
    """Return the MLP width; for a mixture of experts without a dense layer, the total width of a token's active experts."""
    dense = getattr(config, "intermediate_size", None)
    if isinstance(dense, int):
        return _Choice(dense)
    expert, chosen = (getattr(config, key, None) for key in ("moe_intermediate_size", "num_experts_per_tok"))
    if expert and chosen:
        shared = getattr(config, "shared_expert_intermediate_size", None) or 0
        width = expert * chosen + shared
        return _Choice(
            width, f"intermediate_size: {width}, the total width of the experts that process a token in the target"
        )
    width = 64 * math.ceil(config.hidden_size * 8 / 3 / 64)
    return _Choice(width, f"intermediate_size: {width}, 8/3 of hidden_size, since the target's config has none")


def _choose_norm_eps(config: Any) -> _Choice:
    found = getattr(config, "rms_norm_eps", None)
    return (
        _Choice(_EPS, f"rms_norm_eps: {_EPS:g}, since the target's config has none")
        if found is None
        else _Choice(found)
    )
