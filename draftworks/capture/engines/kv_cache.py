"""A key-value cache that grows in steps.

transformers' own dynamic cache concatenates at every token, which allocates and copies the whole cache each time: 87% of
the time of decoding a small model on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

GROWTH = 64
"""Tokens of room made at a time, at least; a long cache grows by a quarter."""


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, views of buffers (B, heads, room, D) with room to spare."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            room = end + max(GROWTH, end // 4)
            self._buffers = (_grown(self.keys, key_states, start, room), _grown(self.values, value_states, start, room))
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._buffers = None


def growing_cache(model: PreTrainedModel) -> DynamicCache:
    """The model's dynamic cache, its plain layers replaced by growing ones; sliding windows and others stay.

    Rows leave it by `reorder_cache`, which layers with a recurrent state have too.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _grown(stored: Tensor, like: Tensor, length: int, room: int) -> Tensor:
    buffer = torch.empty(*like.shape[:2], room, like.shape[-1], dtype=like.dtype, device=like.device)
    if length:
        buffer[:, :, :length] = stored
    return buffer
