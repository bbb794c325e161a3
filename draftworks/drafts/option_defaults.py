"""Draft options whose default is the target's: head counts and the mask token."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from draftworks.config.draft_options import choose_served_heads
from draftworks.config.strategies import resolve_strategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError


class HeadOptions(Protocol):
    num_heads: int | None
    num_kv_heads: int | None


class MaskOptions(Protocol):
    mask_token_id: int | None


class HeadCounts(NamedTuple):
    """Query heads, and key/value heads."""

    num_heads: int
    num_kv_heads: int


def resolve_head_counts(strategy: str, options: HeadOptions, target: TargetParts) -> HeadCounts:
    """Return the options' head counts, else the target's, or the nearest that servers accept.

    Raises:
        ConfigError: num_heads is not a multiple of num_kv_heads.
    """
    heads = options.num_heads or target.num_heads
    kv_heads = options.num_kv_heads or min(target.num_kv_heads, heads)
    if options.num_heads is None and resolve_strategy(strategy).heads_divide_hidden and target.hidden_size % heads:
        served = choose_served_heads(target.hidden_size, heads, kv_heads)
        heads, kv_heads = served.num_heads, options.num_kv_heads or served.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(f"{strategy}: num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    return HeadCounts(heads, kv_heads)


def resolve_mask_token(strategy: str, options: MaskOptions, target: TargetParts) -> int:
    """Return the option's mask token, else the target's last id. Raises ConfigError if the target has no such id."""
    token = target.vocab_size - 1 if options.mask_token_id is None else options.mask_token_id
    if token >= target.vocab_size:
        raise ConfigError(f"{strategy}: mask_token_id {token} is outside the target's {target.vocab_size} tokens")
    return token
