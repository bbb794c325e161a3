"""One-token steps of small float32 Llama models on a CPU, with a quarter of the operators that the model's own step has.

Such a step is bound by the overhead of its operators. Here the projections of queries, keys and values are one product,
those of gate and up another, both outputs are added by the product itself, rotary factors come from a table, and keys and
values go into buffers with room for the whole answer. The mathematics is the model's own (transformers,
`modeling_llama.py`), to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

LARGEST = 256 << 20
"""Bytes of weights up to which the overhead counts; the weights of the steps are a copy."""
_ROPE_OF_POSITION = ("default", "linear", "llama3")
"""Rotary embeddings whose factors depend on nothing but the position."""


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer, (out, in) each but the transposed `output` and `down`, (in, out)."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaSteps:
    """The weights of a Llama, arranged for steps; `begin` starts from what the model itself made of the prompts."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.config: Any = model.config
        self._rotary_embedding = model.model.rotary_emb
        layers: Any = model.model.layers
        self.layers = [
            _Layer(
                each.input_layernorm.weight,
                torch.cat([each.self_attn.q_proj.weight, each.self_attn.k_proj.weight, each.self_attn.v_proj.weight]),
                each.self_attn.o_proj.weight.t().contiguous(),
                each.post_attention_layernorm.weight,
                torch.cat([each.mlp.gate_proj.weight, each.mlp.up_proj.weight]),
                each.mlp.down_proj.weight.t().contiguous(),
            )
            for each in layers
        ]
        self.embedding = model.model.embed_tokens.weight
        self.norm = model.model.norm.weight
        self.head = model.lm_head.weight

    @cached_property
    def rotary(self) -> Tensor:
        """Cosines and, with the sign of the half that they multiply, sines, (positions, 2, D)."""
        positions = torch.arange(self.config.max_position_embeddings)[None]
        cos, sin = self._rotary_embedding(self.embedding, positions)  # (1, positions, D)
        half = sin.shape[-1] // 2
        return torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)

    def begin(self, cache: DynamicCache, mask: Tensor, more: int) -> LlamaAnswers:
        """Go on after prompts.

        Args:
            cache: their keys and values.
            mask: (B, S), 0 for padding.
            more: largest number of tokens that will follow.
        """
        return LlamaAnswers(self, cache, mask, more)


def find_steps(model: PreTrainedModel) -> LlamaSteps | None:
    """Return the steps of a model that they suit, else None."""
    if type(model) is not LlamaForCausalLM or model.training:
        return None
    config: Any = model.config
    weights = list(model.parameters())
    plain = (
        config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _ROPE_OF_POSITION
        and not any(name.endswith("_proj.bias") for name, _ in model.named_parameters())
    )
    small = sum(each.nbytes for each in weights) <= LARGEST
    on_cpu = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in weights)
    return LlamaSteps(model) if plain and small and on_cpu else None


class LlamaAnswers:
    """The answers of a batch that are being decoded."""

    def __init__(self, steps: LlamaSteps, cache: DynamicCache, mask: Tensor, more: int) -> None:
        self._steps = steps
        self._length = mask.shape[1]
        self._heads = steps.config.num_attention_heads
        self._kv_heads = steps.config.num_key_value_heads
        room = self._length + more
        self._stored = [self._make_room(layer, room) for layer in cache.layers]  # (B, 2, kv heads, room, D) each
        self._bias = torch.zeros(len(mask), 1, 1, room)  # -inf where there is padding
        self._bias[:, 0, 0, : self._length].masked_fill_(mask == 0, -torch.inf)

    def _make_room(self, layer: Any, room: int) -> Tensor:
        rows, kv_heads, length, size = layer.keys.shape
        stored = torch.empty(rows, 2, kv_heads, room, size)
        stored[:, 0, :, :length] = layer.keys
        stored[:, 1, :, :length] = layer.values
        return stored

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (B, V) after one more token for each row; tokens and positions are (B,)."""
        steps, rows, end = self._steps, len(tokens), self._length + 1
        eps, width = steps.config.rms_norm_eps, (steps.config.hidden_size,)
        cos, sin = steps.rotary[positions].unsqueeze(2).unbind(1)  # (B, 1, D) each
        size, turned = cos.shape[-1], self._heads + self._kv_heads
        bias = self._bias[..., :end]
        hidden = steps.embedding[tokens]  # (B, H)
        for layer, stored in zip(steps.layers, self._stored, strict=True):
            qkv = F.linear(F.rms_norm(hidden, width, layer.input_norm, eps), layer.qkv).view(rows, -1, size)
            qk = qkv[:, :turned]  # (B, heads + kv heads, D)
            first, second = qk.chunk(2, -1)
            qk = torch.addcmul(qk * cos, torch.cat([second, first], -1), sin)
            stored[:, 0, :, self._length] = qk[:, self._heads :]
            stored[:, 1, :, self._length] = qkv[:, turned:]
            keys, values = stored[..., :end, :].unbind(1)  # (B, kv heads, end, D) each
            # the heads of a group are the rows of one product
            queries = qk[:, : self._heads].view(rows, self._kv_heads, -1, size)
            seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
            hidden = torch.addmm(hidden, seen.reshape(rows, -1), layer.output)
            gate, up = F.linear(F.rms_norm(hidden, width, layer.mlp_norm, eps), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        self._length = end
        return F.linear(F.rms_norm(hidden, width, steps.norm, eps), steps.head)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows (their indices, ascending) only."""
        self._stored = [stored.index_select(0, rows) for stored in self._stored]
        self._bias = self._bias.index_select(0, rows)
