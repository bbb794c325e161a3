"""Options that drafts share: shape and sizes of their layers, read from the target's configuration; teachers; their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from draftworks.config.strategies import StrategyOptions, TargetSizes
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import read_json
from draftworks.storage.identity import LayerTap


def choose_eagle_taps(strategy: str, given: list[int] | None, num_layers: int) -> tuple[LayerTap, ...]:
    """Return the taps of an EAGLE-3-like draft, ascending: the three default ones, or those in `given`. Raises ConfigError.

    In a target too shallow for the default ones they are spread over its layers, fewer than three if there are fewer.
    """
    default = [2, num_layers // 2, num_layers - 3]
    if not 2 < default[1] < default[2]:
        default = spread_taps(3, num_layers)
    return parse_taps(strategy, given, default, num_layers, len(default if given is None else given))


def spread_taps(count: int, num_layers: int) -> list[int]:
    """Return so many hf_index values spread evenly over the outputs of all layers but the last, or as many as there are.

    The output of the last layer is no tap; a target of one layer has its embeddings alone.
    """
    last = num_layers - 1
    if last == 0:
        return [0]
    count = min(count, last)
    return [round(1 + i * (last - 1) / max(count - 1, 1)) for i in range(count)]


def parse_taps(
    strategy: str, given: list[int] | None, default: list[int], num_layers: int, count: int
) -> tuple[LayerTap, ...]:
    """Return `given`, or else `default`, layer ids as taps.

    Raises:
        ConfigError: the ids are too few or many, outside the target, repeated, or not ascending.
    """
    ids = default if given is None else given
    origin = "default" if given is None else "configured"
    where = f"{strategy}: {origin} layer ids {ids} of a target with {num_layers} layers"
    advice = "Set options.layer_ids to different hf_index values (0 = embeddings, k = after k layers)"
    if len(ids) != count:
        raise ConfigError(f"{where}: expected {count} taps, found {len(ids)}. {advice}")
    outside = [k for k in ids if not 0 <= k < num_layers]
    if outside:
        raise ConfigError(f"{where}: {outside} outside 0..{num_layers - 1}. {advice}")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: taps collide. {advice}")
    if sorted(ids) != ids:
        raise ConfigError(f"{where}: expected ascending order, {sorted(ids)}")
    return tuple(LayerTap(k) for k in ids)


def fit_draft_vocabulary(default: int, given: Mapping[str, Any], target: TargetSizes) -> int:
    """Return the default size of a draft's vocabulary, at most that of the target's."""
    return min(default, target.vocab_size)


def check_heads(num_heads: int | None, num_kv_heads: int | None) -> None:
    """Raise ValueError if both are given and `num_heads` is not a multiple of `num_kv_heads`; None means the target's."""
    if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")


def check_mask_token(strategy: str, mask_token_id: int | None, vocab_size: int) -> None:
    """Raise ConfigError for a configured mask token that the target does not have."""
    if mask_token_id is not None and mask_token_id >= vocab_size:
        raise ConfigError(
            f"{strategy}: mask_token_id {mask_token_id} is outside the target's vocabulary, 0..{vocab_size - 1}. "
            "Set options.mask_token_id to the id of a token that no text has"
        )


@dataclass(frozen=True)
class ServedHeads:
    """Numbers of query heads and key-value heads that transformers' LlamaConfig accepts."""

    num_heads: int
    num_kv_heads: int


def choose_served_heads(hidden_size: int, num_heads: int, num_kv_heads: int) -> ServedHeads:
    """Return the largest number of heads, up to `num_heads`, that divides `hidden_size`.

    Servers read EAGLE-3 and P-EAGLE drafts with transformers' LlamaConfig, which refuses other numbers, although only
    `head_dim` affects the computation.
    """
    dividing = [heads for heads in range(num_heads, 0, -1) if hidden_size % heads == 0]
    heads = next((heads for heads in dividing if heads % num_kv_heads == 0), dividing[0])
    return ServedHeads(heads, math.gcd(heads, num_kv_heads))


def check_served_heads(strategy: str, num_heads: int | None, hidden_size: int) -> None:
    """Raise ConfigError if the configured number of heads does not divide `hidden_size`, which servers refuse."""
    if num_heads is not None and hidden_size % num_heads:
        raise ConfigError(
            f"{strategy}: num_heads {num_heads} does not divide the target's hidden_size {hidden_size}, and no server loads "
            f"such a draft. Set options.num_heads to {choose_served_heads(hidden_size, num_heads, 1).num_heads}, or leave it out"
        )


class TeacherOptions(StrategyOptions):
    """How the target's distribution teaches the draft. A class that inherits it takes over `added`."""

    added: ClassVar[tuple[str, ...]] = ("teacher_temperature",)

    teacher_temperature: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="T: draft and target are compared as softmax(logits / T), and that loss is multiplied by T². Leave it at 1 "
        "for servers that draft greedily, as most do.",
    )


SCHEMA_VERSION = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class DraftConfig:
    """Contents of a draft's config.json.

    Attributes:
        draft: description by the strategy, with its options.
        target_digest: digest of the target that the draft was trained for.
        weights_digest: digest of model.safetensors, so that files of two drafts cannot be mixed.
        provenance: data, training and versions, for information; never checked.
    """

    strategy: str
    draft: dict[str, Any]
    target_digest: str
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def read_draft_config(folder: Path) -> DraftConfig:
    """Read a draft's config.json.

    Raises:
        StoreError: missing, damaged, or of another schema.
    """
    path = folder / CONFIG
    try:
        values = read_json(path)
        config = DraftConfig(**values)
    except FileNotFoundError:
        raise StoreError(f"{folder}: not a draft: {CONFIG} is missing") from None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: not the config of a draft ({error}). Train the draft again") from error
    if config.schema_version != SCHEMA_VERSION:
        raise StoreError(f"{path}: schema {config.schema_version}, expected {SCHEMA_VERSION}")
    return config


ROPE_KEYS = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": (
        *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("rope_theta", "factor"),
}
"""The rope types that drafts can compute, with the parameters that each requires."""


class LayerOptions(StrategyOptions):
    """Layer parameters that default to the target's; drafts made by other software often have their own."""

    structural: ClassVar[tuple[str, ...]] = ("head_dim", "rms_norm_eps", "rope")
    added: ClassVar[tuple[str, ...]] = structural

    head_dim: int | None = Field(
        default=None, gt=0, multiple_of=2, description="Size of an attention head; default the target's."
    )
    rms_norm_eps: float | None = Field(default=None, gt=0, description="Default the target's.")
    intermediate_size: int | None = Field(default=None, gt=0, description="Width of the MLPs; default the target's.")
    num_heads: int | None = Field(default=None, gt=0, description="Default the target's.")
    num_kv_heads: int | None = Field(default=None, gt=0, description="Default the target's.")
    rope: dict[str, Any] | None = Field(
        default=None, description="Rotary positions, as rope_parameters of transformers 5; default the target's."
    )

    @field_validator("rope")
    @classmethod
    def _check_rope(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        kind = value.get("rope_type")
        if kind not in ROPE_KEYS:
            raise ValueError(f"rope_type: expected one of {', '.join(ROPE_KEYS)}, found {kind!r}")
        wrong = [key for key in ROPE_KEYS[kind] if not _is_positive(value.get(key))]
        if wrong:
            raise ValueError(f"rope of type {kind}: expected a number above 0 as {' and '.join(wrong)}, found {value}")
        return value

    @model_validator(mode="after")
    def _check_head_numbers(self) -> LayerOptions:
        check_heads(self.num_heads, self.num_kv_heads)
        return self


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


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
