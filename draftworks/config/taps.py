"""Layer ids of a strategy's options as taps."""

from __future__ import annotations

from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap


def eagle_taps(strategy: str, given: list[int] | None, num_layers: int) -> tuple[LayerTap, ...]:
    """The taps of EAGLE-3 and its relatives, ascending: three unless the options name others. Raises ConfigError."""
    default = [2, num_layers // 2, num_layers - 3]
    return checked_taps(strategy, given, default, num_layers, len(default if given is None else given))


def checked_taps(
    strategy: str, given: list[int] | None, default: list[int], num_layers: int, count: int
) -> tuple[LayerTap, ...]:
    """Explicit or default layer ids as taps, with every way they can be wrong reported."""
    ids = default if given is None else given
    origin = "default" if given is None else "configured"
    where = f"{strategy}: {origin} layer ids {ids} of a target with {num_layers} layers"
    advice = "Set options.layer_ids to different hf_index values (0 = embeddings, k = after k layers)."
    if len(ids) != count:
        raise ConfigError(f"{where}: expected {count} taps, found {len(ids)}. {advice}")
    outside = [k for k in ids if not 0 <= k < num_layers]
    if outside:
        raise ConfigError(f"{where}: {outside} outside 0..{num_layers - 1}. {advice}")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: taps collide. {advice}")
    if sorted(ids) != ids:
        raise ConfigError(f"{where}: expected ascending order, so that the inputs of `fc` are unambiguous. {advice}")
    return tuple(LayerTap(k) for k in ids)
