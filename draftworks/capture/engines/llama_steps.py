"""One-token steps of small float32 Llama models on a CPU, with a fraction of the operators that the model's own step has.

Such a step is bound by the overhead of its operators. Here the projections of queries, keys and values are one product,
those of gate and up another; both have the norm's weights in them, so that of a norm a division is left. Numbers that
rotate together lie side by side, as one complex number, whose factors come from a table. Both outputs are added by the
product itself, and keys and values go into one buffer with room for the whole answer. The mathematics is the model's own
(transformers, `modeling_llama.py`), to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from draftworks.capture.engines.caches import Frame, join_columns

LARGEST = 256 << 20
"""Bytes of weights up to which the overhead counts; the weights of the steps are a copy."""
_ROPE_OF_POSITION = ("default", "linear", "llama3")
"""Rotary embeddings whose factors depend on nothing but the position."""


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer, (in, out) each; `qkv` and `gate_up` are multiplied by the weights of the norm before them."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaSteps:
    """The weights of a Llama, arranged for steps."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.config: Any = model.config
        self._rotary_embedding = model.model.rotary_emb
        layers: Any = model.model.layers
        self.head_dim: int = layers[0].self_attn.head_dim
        self.layers = [self._arrange(each) for each in layers]
        self.embedding = model.model.embed_tokens.weight
        self.norm = model.model.norm.weight
        self.head = model.lm_head.weight
        # the root of the sum of squares, and the root of their mean in a norm, differ by these
        self.least_norm = torch.full((1, 1), math.sqrt(self.config.rms_norm_eps * self.config.hidden_size))

    def _arrange(self, layer: Any) -> _Layer:
        attention, mlp, size = layer.self_attn, layer.mlp, self.head_dim
        side_by_side = pair_halves(size)
        turned = [
            each.weight.unflatten(0, (-1, size))[:, side_by_side].flatten(0, 1)
            for each in (attention.q_proj, attention.k_proj)
        ]
        # attention returns the heads of all groups in turn, the first of each group before the second
        groups = (self.config.num_key_value_heads, -1, size)
        output = attention.o_proj.weight.t().unflatten(0, groups).transpose(0, 1).flatten(0, 2)
        return _Layer(
            _after_norm(layer.input_layernorm, torch.cat([*turned, attention.v_proj.weight])),
            output.contiguous(),
            _after_norm(layer.post_attention_layernorm, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
            mlp.down_proj.weight.t().contiguous(),
        )

    @cached_property
    def rotary(self) -> Tensor:
        """The factors of every position, (positions, 1, D / 2) complex."""
        positions = torch.arange(self.config.max_position_embeddings)[None]
        cos, sin = self._rotary_embedding(self.embedding, positions)  # (1, positions, D), both halves the same
        half = cos.shape[-1] // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]


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


def pair_halves(size: int) -> Tensor:
    """Return the order in which the numbers of a head that rotate together are neighbours, (D,)."""
    return torch.arange(size).view(2, -1).t().flatten()


def _after_norm(norm: Any, weight: Tensor) -> Tensor:
    """Return weights (in, out) for the input over its Euclidean norm, where the model's (out, in) are for `norm` of it."""
    return (weight * (norm.weight * math.sqrt(weight.shape[-1]))).t().contiguous()


class LlamaAnswers:
    """Keys and values of the answers of a batch, in one frame of columns as those of `caches.py`."""

    def __init__(self, steps: LlamaSteps) -> None:
        self._steps = steps
        self._heads = steps.config.num_attention_heads
        self._kv_heads = steps.config.num_key_value_heads
        self._length = 0
        # (layers, B, 2, kv heads, room, D)
        self._stored = torch.empty(len(steps.layers), 0, 2, self._kv_heads, 0, steps.head_dim)
        self._bias = torch.empty(0, 1, 1, 0)  # -inf before a row's first column

    def join(self, keep: Tensor, read: Sequence[DynamicCache], rows: Sequence[Tensor], frame: Frame) -> None:
        """Keep these rows, then add those rows of what the model itself made of prompts.

        Args:
            frame: of all these rows afterwards; its `more` is the largest number of tokens that will follow.
        """
        width, count = frame.width, len(frame.starts)
        stored = torch.empty(len(self._stored), count, 2, self._kv_heads, width + frame.more, self._steps.head_dim)
        side_by_side = pair_halves(self._steps.head_dim)
        for index, into in enumerate(stored):
            held = self._stored[index, ..., : self._length, :]
            for kind, name in enumerate(("keys", "values")):
                made: list[Tensor] = [getattr(each.layers[index], name) for each in read]
                if name == "keys":
                    made = [each[..., side_by_side] for each in made]
                join_columns([held[:, kind], *made], [keep, *rows], into[:, kind], width)
        self._stored, self._length = stored, width
        self._bias = torch.zeros(count, 1, 1, width + frame.more)
        self._bias[:, 0, 0, :width].masked_fill_(torch.arange(width) < frame.starts[:, None], -torch.inf)

    def step(self, tokens: Tensor, positions: Tensor, frame: Frame) -> Tensor:
        """Return the logits (B, V) after one more token for each row; tokens and positions are (B,)."""
        steps, rows, end = self._steps, len(tokens), self._length + 1
        size, turned = steps.head_dim, self._heads + self._kv_heads
        factors = steps.rotary[positions]  # (B, 1, D / 2)
        bias = self._bias[..., :end]
        places = self._stored[..., self._length, :].unbind()  # (B, 2, kv heads, D) each
        keys, values = (self._stored[:, :, kind, :, :end].unbind() for kind in range(2))  # (B, kv heads, end, D) each
        hidden = steps.embedding[tokens]  # (B, H)
        for layer, place, own_keys, own_values in zip(steps.layers, places, keys, values, strict=True):
            qkv = torch.mm(self._normalize(hidden), layer.qkv).view(rows, -1, size)
            torch.view_as_complex(qkv.view(rows, -1, size // 2, 2))[:, :turned].mul_(factors)
            place.copy_(qkv[:, self._heads :].view(place.shape))
            # the heads of a group are the rows of one product
            queries = qkv[:, : self._heads].view(rows, self._kv_heads, -1, size)
            seen = F.scaled_dot_product_attention(queries, own_keys, own_values, attn_mask=bias)
            hidden = torch.addmm(hidden, seen.transpose(1, 2).reshape(rows, -1), layer.output)
            gate, up = torch.mm(self._normalize(hidden), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        self._length = end
        normed = F.rms_norm(hidden, (hidden.shape[-1],), steps.norm, steps.config.rms_norm_eps)
        return F.linear(normed, steps.head)

    def _normalize(self, hidden: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return hidden / norm.hypot_(self._steps.least_norm)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows (their indices) only, in this order. Those that stay where they are cost nothing."""
        to = (rows != torch.arange(len(rows))).nonzero()[:, 0]
        used = self._stored[..., : self._length, :]
        for stored in used:
            stored[to] = stored[rows[to]]
        self._stored = self._stored[:, : len(rows)]
        self._bias = self._bias[rows]
