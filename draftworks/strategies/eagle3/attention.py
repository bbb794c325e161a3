"""Attention of test-time training (EAGLE-3, arXiv 2503.01840): one causal block and some diagonals.

At step i a row t sees the keys of step 0 at positions 0 … t of its document, or the newest `window` of these, and its own keys of
the steps 1 … i. Written as one softmax this needs scores of S x (S + i). The back ends give the same numbers to rounding: `eager` writes the scores out,
`sdpa` and `flex` are torch's own with a mask over the keys of all steps, and `auto` computes no diagonal as a matrix where
this device has a kernel for that (draftworks.strategies.eagle3.fused_attention), and is sdpa elsewhere and where a window leaves something out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftworks.drafts.documents import Documents
from draftworks.drafts.flex import check_flex
from draftworks.strategies.eagle3.fused_attention import fused_kernel_works, fused_ttt_attention
from draftworks.strategies.eagle3.masked_attention import eager_ttt_attention, flex_ttt_attention, sdpa_ttt_attention

TttAttention = Callable[..., Tensor]
"""Of query, keys, values and documents; those that know windows take one after these."""


@torch.compiler.disable  # the fused kernel's private operators, and flex, which is compiled by itself
def ttt_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    documents: Documents,
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Attention of step i = len(keys) - 1.

    Args:
        query: (B, heads, S, D).
        keys, values: of the steps 0 … i. Those of step 0 are (B, kv_heads, S, D), heads a multiple of kv_heads; those
            of later steps are (B, heads, S, D) by `per_query_head`, because row-wise products want plain memory.
        documents: of the rows; none sees another.
        backend: auto, eager, sdpa or flex.
        window: how many positions of step 0 a row sees, its own included; None for all.

    Returns:
        (B, heads, S, D), dtype of `query`.

    Raises:
        ConfigError: flex with gradients on a CPU, where torch has none.
    """
    bounds = () if window is None or window >= documents.longest else (window,)
    return _attention(query, backend, bool(bounds))(query, keys, values, documents, *bounds)


def _attention(query: Tensor, backend: str, windowed: bool) -> TttAttention:
    if backend == "eager":
        return eager_ttt_attention
    if backend == "flex":
        check_flex("eagle3", query.device)
        return flex_ttt_attention
    if backend == "auto" and not windowed and fused_kernel_works(query.device, query.dtype, query.shape[-1]):
        return fused_ttt_attention
    return sdpa_ttt_attention
