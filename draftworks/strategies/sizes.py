"""Checks of sizes that strategies share."""

from __future__ import annotations


def check_heads(num_heads: int | None, num_kv_heads: int | None) -> None:
    """ValueError where both are given and do not go together; what is not given is the target's."""
    if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
