"""Key-value caches whose rows join and leave: one frame of columns for all rows, each of which ends at the frame's end.

A row of n tokens has the last n columns of a frame, so that all rows write their next token into the same new column, and
distances between columns are distances between positions, which sliding windows count. Columns before a row's first one
are masked. Layers with a recurrent state have no columns; their rows are joined as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

GROWTH = 64
"""Tokens for which a buffer has room beyond those that it holds; copying it this seldom costs little at any length."""


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, as views of larger buffers (B, heads, room, D) that have space for more tokens.

    transformers' own layer concatenates at every token, which allocates and copies the whole cache each time.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if start == 0:  # a prompt: nobody knows whether tokens follow
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            assert self.keys is not None, "lazy_initialization makes both"
            assert self.values is not None
            self._buffers = (_widen(self.keys, end + GROWTH), _widen(self.values, end + GROWTH))
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]  # (B, heads, end, D)
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor, width: int) -> None:
        """Take over buffers (B, heads, room, D), of which `width` tokens are held."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._buffers = (keys, values)
        self.keys, self.values = keys[:, :, :width], values[:, :, :width]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._buffers = None


def _widen(stored: Tensor, room: int) -> Tensor:
    buffer = stored.new_empty(*stored.shape[:2], room, stored.shape[-1])  # (B, heads, room, D)
    buffer[:, :, : stored.shape[-2]] = stored
    return buffer


def make_growing_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the model's dynamic cache with its plain layers replaced by `GrowingLayer`; other kinds of layers stay.

    Sliding-window layers, for example, are not replaced. Batch rows are removed with `reorder_cache`, which layers with
    a recurrent state have too.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


_JOINABLE = {
    "GrowingLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
}
"""Names, as earlier versions of transformers have only some of these classes."""


def is_joinable(cache: DynamicCache) -> bool:
    """Whether `join_caches` knows all kinds of layers in a cache. Rows of others begin together, and only leave."""
    return all(
        type(layer).__name__ in _JOINABLE and isinstance(getattr(layer, "conv_states", {}), dict)
        for layer in cache.layers
    )


@dataclass(frozen=True)
class Frame:
    """Where the tokens of a batch's rows are.

    Attributes:
        starts: first column of each row, (B,) int64.
        width: columns that hold tokens.
        more: largest number of tokens that will follow in a row.
    """

    starts: Tensor
    width: int
    more: int

    @property
    def is_full(self) -> bool:
        """Whether every row has all columns, so that nothing is to be masked."""
        return not bool(self.starts.any())


@dataclass(frozen=True)
class RowSize:
    """Bytes of one row of a cache.

    Attributes:
        columns: for each layer with columns, bytes of one, and the largest number of them; None is no limit.
        states: bytes that do not depend on the length.
    """

    columns: tuple[tuple[int, int | None], ...]
    states: int

    @classmethod
    def of(cls, cache: DynamicCache) -> RowSize:
        """Return the size of a cache's rows by what it holds of one row of one token."""
        columns, states = [], 0
        for layer in cache.layers:
            kept: Any = layer
            if isinstance(layer, DynamicLayer) and kept.keys is not None:
                window = kept.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
                columns.append((kept.keys.nbytes + kept.values.nbytes, window))
            states += sum(each.nbytes for each in _list_states(layer))
        return cls(tuple(columns), states)

    def count_bytes(self, width: int) -> int:
        """Return the bytes of a row in a frame of `width` columns."""
        return self.states + sum(size * (width if most is None else min(width, most)) for size, most in self.columns)


def _list_states(layer: Any) -> list[Tensor]:
    if not isinstance(layer, LinearAttentionLayer) or not isinstance(layer.conv_states, dict):
        return []
    found = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [each for each in found if each is not None]


def join_caches(caches: Sequence[DynamicCache], rows: Sequence[Tensor], frame: Frame) -> DynamicCache:
    """Return one cache of these rows of caches, in a frame. The caches are taken apart, layer by layer.

    Args:
        rows: for each cache, the indices of the rows that go on; all of their tokens are in its last `frame.width` columns.
    """
    first = caches[0]
    for index, layer in enumerate(first.layers):
        parts = [each.layers[index] for each in caches]
        if isinstance(layer, LinearAttentionLayer):
            _join_states(parts, rows)
        if isinstance(layer, DynamicLayer):
            _join_columns(parts, rows, frame)
        for each in caches[1:]:
            each.layers[index] = DynamicLayer()  # its memory is of use for the next layer
    return first


def _join_states(layers: Sequence[Any], rows: Sequence[Tensor]) -> None:
    """Give the first of these layers the states of all rows."""
    for kind in ("conv_states", "recurrent_states"):
        states: dict[int, Tensor | None] = getattr(layers[0], kind)
        for number, state in states.items():
            if state is not None:
                states[number] = torch.cat(
                    [getattr(each, kind)[number][chosen.to(state.device)] for each, chosen in zip(layers, rows)]
                )


def _join_columns(layers: Sequence[Any], rows: Sequence[Tensor], frame: Frame) -> None:
    """Give the first of these layers the keys and values of all rows."""
    first, width = layers[0], frame.width
    sliding = isinstance(first, DynamicSlidingWindowLayer)
    held = min(width, first.sliding_window - 1) if sliding else width
    joined, count = [], sum(map(len, rows))
    for name in ("keys", "values"):
        parts = [getattr(each, name) for each in layers]
        room = held if sliding else held + min(GROWTH, frame.more)
        joined.append(parts[0].new_empty(count, parts[0].shape[1], room, parts[0].shape[-1]))
        join_columns(parts, rows, joined[-1], held)
    if sliding:
        first.keys, first.values = joined
        first.cumulative_length = width
    elif isinstance(first, GrowingLayer):
        first.hold(joined[0], joined[1], width)
    else:
        first.keys, first.values = (each[:, :, :width] for each in joined)


def join_columns(parts: Sequence[Tensor], rows: Sequence[Tensor], into: Tensor, width: int) -> None:
    """Copy these rows of tensors (B, heads, columns, D) into (sum of rows, heads, at least `width`, D), to end at `width`.

    Columns before those of a part are 0: masked, but no NaN.
    """
    at = 0
    for part, chosen in zip(parts, rows, strict=True):
        place = into[at : at + len(chosen)]
        begin = width - part.shape[-2]
        place[:, :, : max(begin, 0)] = 0
        place[:, :, max(begin, 0) : width] = part[chosen.to(part.device), :, max(-begin, 0) :]
        at += len(chosen)
