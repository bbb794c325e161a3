"""What the judges under SGLang's own Python share: its layers on a CPU without a server, with an attention that is not its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_context
from torch import Tensor, nn
from torch.nn import functional as F


class Cache:
    """Keys and values (n, heads, D) of the context, by layer, as SGLang writes them."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def set_kv_buffer(self, layer: nn.Module, where: Any, key: Tensor, value: Tensor, *scales: Any) -> None:
        self.written[layer.layer_id] = (key, value)


class PlainAttention(nn.Module):
    """Replaces a layer's `RadixAttention`, with the window and the direction that SGLang read for it."""

    def __init__(self, of: nn.Module, cache: Cache) -> None:
        super().__init__()
        self.layer_id, self.k_scale, self.v_scale = of.layer_id, of.k_scale, of.v_scale
        self._of, self._cache = of, cache

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Any) -> Tensor:
        block, of = len(query), self._of
        keys, values = (
            torch.cat([old, new.view(block, *old.shape[1:])]).transpose(0, 1)
            for old, new in zip(self._cache.written[self.layer_id], (key, value))
        )
        back = torch.arange(keys.shape[1] - block, keys.shape[1])[:, None] - torch.arange(keys.shape[1])
        seen = torch.ones_like(back, dtype=torch.bool) if of.attn_type == AttentionType.ENCODER_ONLY else back >= 0
        if of.sliding_window_size >= 0:
            seen = seen & (back <= of.sliding_window_size)
        queries = query.view(block, of.tp_q_head_num, -1).transpose(0, 1)
        attended = F.scaled_dot_product_attention(queries, keys, values, seen, scale=of.scaling, enable_gqa=True)
        return attended.transpose(0, 1).flatten(1)


def run_block(model: nn.Module, features: Tensor, anchor: Tensor, embedding: Tensor) -> Tensor:
    """Return the states (block, H) that one of SGLang's models of a DFlash backbone makes of a block.

    Args:
        features: (n, taps · H), of the context; their keys and values are put where attention finds them, as SGLang's
            worker does.
        anchor: (1,), the token that the block begins with.
    """
    cache, rows = Cache(), len(features)
    hidden = model.project_target_hidden(features)
    for layer in model.layers:
        attention = layer.self_attn
        key, value = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, hidden))
        key = attention.apply_k_rope(torch.arange(rows), attention.apply_k_norm(key))
        heads = (-1, attention.num_kv_heads, attention.head_dim)
        cache.set_kv_buffer(attention.attn, None, key.view(heads), value.view(heads))
    attentions = [layer.self_attn.attn for layer in model.layers]
    for layer, attention in zip(model.layers, attentions):
        layer.self_attn.attn = PlainAttention(attention, cache)
    block = torch.full((model.block_size,), model.draft_config.mask_token_id)
    block[0] = anchor[0]
    embedded = F.embedding(block, embedding)
    states = model(block, torch.arange(rows, rows + len(block)), None, input_embeds=embedded).hidden_states
    for layer, attention in zip(model.layers, attentions):
        layer.self_attn.attn = attention
    return states


def load_export(model: nn.Module, folder: Path) -> nn.Module:
    """Load an export's tensors by the model's own method; parameters that none of them is for are NaN."""
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model.eval()


def alone_on_a_cpu(folder: Path) -> None:
    """Sets up the process state that SGLang's layers need."""
    get_context().override_server_args(device="cpu").install()
    meeting = f"file://{folder}/meeting"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=meeting, backend="gloo")
    initialize_model_parallel()
