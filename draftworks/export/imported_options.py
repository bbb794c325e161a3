"""Derive the options under which our strategies build a draft that another system trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.export.export_format import DraftShape
from draftworks.storage.identity import LayerTap


def derive_options(shape: DraftShape, parts: TargetParts, hints: Mapping[str, Any], where: str) -> Any:
    """Return the typed options under which our strategy builds a draft of this shape.

    Sizes that equal the strategy's default for the target are not set.

    Args:
        hints: options of the original training, where the checkpoint has them; `shape` has precedence. Unknown names
            are ignored.

    Raises:
        ConfigError: a value that the strategy does not take.
    """
    spec = resolve_strategy(shape.strategy)
    known = spec.options.model_fields
    sizes = {
        **_list_sizes(shape, parts),
        "draft_vocab_size": shape.draft_vocab_size,
        "num_layers": shape.num_layers,
        "num_taps": len(shape.taps),
        "train_embeddings": shape.own_embedding,
        **shape.options,
    }
    values = {name: value for name, value in {**hints, **sizes}.items() if name in known}
    if values.get("mask_token_id") == parts.vocab_size - 1:
        values["mask_token_id"] = None
    if "layer_ids" not in known:
        return spec.parse_options(values, where=where)
    values["layer_ids"] = None
    if _find_default_taps(spec, values, parts.num_layers, where) != shape.taps:
        values["layer_ids"] = [tap.hf_index for tap in shape.taps]
    return spec.parse_options(values, where=where)


def _list_sizes(shape: DraftShape, parts: TargetParts) -> dict[str, Any]:
    defaults = {
        "head_dim": parts.head_dim,
        "rms_norm_eps": parts.rms_norm_eps,
        "rope": dict(parts.rope),
        "num_heads": parts.num_heads,
        "num_kv_heads": min(parts.num_kv_heads, shape.num_heads),
        "intermediate_size": parts.intermediate_size,
    }
    found = {name: getattr(shape, name) for name in defaults} | {"rope": dict(shape.rope)}
    return {name: None if size == defaults[name] else size for name, size in found.items()}


def _find_default_taps(
    spec: StrategySpec, values: Mapping[str, Any], num_layers: int, where: str
) -> tuple[LayerTap, ...] | None:
    """Return the strategy's default taps; None for a target that is not deep enough for them."""
    options = spec.parse_options(dict(values), where=where)
    try:
        return spec.taps(num_layers, options)
    except ConfigError:
        return None
