"""Tensors that were put into a store and are not published yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ShardBuffer:
    """Tensors in memory, by key, until they fill a shard.

    Args:
        shard_bytes: `full` is true from this size on.
        keep_tensors: keep the tensors that are added, which nobody changes afterwards, and not copies of them.
    """

    def __init__(self, shard_bytes: int, keep_tensors: bool = False) -> None:
        self._shard_bytes = shard_bytes
        self._keep_tensors = keep_tensors
        self._tensors: dict[str, Tensor] = {}
        self.nbytes = 0

    @property
    def full(self) -> bool:
        return self.nbytes >= self._shard_bytes

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors that were added and are not published yet, by key."""
        return self._tensors

    def add(self, key: str, tensor: Tensor) -> None:
        """Add a tensor under a key; a key that is present is ignored, since keys are content."""
        if key not in self._tensors:
            on_cpu = tensor.detach().cpu().contiguous()
            self._tensors[key] = on_cpu if self._keep_tensors else on_cpu.clone()
            self.nbytes += tensor.nbytes

    def discard(self, key: str) -> None:
        tensor = self._tensors.pop(key, None)
        self.nbytes -= 0 if tensor is None else tensor.nbytes

    def clear(self) -> None:
        """Forget all tensors: they are published."""
        self._tensors, self.nbytes = {}, 0
