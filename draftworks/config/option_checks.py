"""Validation of strategy options: layer ids as taps, and numbers of attention heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftworks.config.strategies import TargetSizes
from draftworks.errors import ConfigError
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
