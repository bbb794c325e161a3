"""Torch's fused kernels of causal attention, with their backward: one adapter per kind of device.

The operators are private to torch, so they may change without notice: `ttt_fused.fused_kernel_works` tries them before
they are relied on. The CUDA adapter has been checked against the operators' declarations only, never on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Attended(NamedTuple):
    """Output (B, heads, S, D), log-sum-exp of its scaled scores (B, heads, S), and what the backward wants besides."""

    output: Tensor
    lse: Tensor
    rest: tuple[Any, ...] = ()


class Gradients(NamedTuple):
    """By query, key and value, in their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor


class CausalKernel(ABC):
    """Causal attention scaled by D^-1/2. Query (B, heads, S, D); key, value (B, kv_heads, S, D)."""

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended: ...

    @abstractmethod
    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        """The kernel rebuilds its probabilities as exp(scores - attended.lse) and believes `attended.output`."""


class CpuFlash(CausalKernel):
    """Any floating dtype, any head size."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        return Attended(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal=True)
        )

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        return Gradients(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, attended.output, attended.lse, 0.0, True
            )
        )


class CudaFlash(CausalKernel):
    """float16 and bfloat16; head sizes that are multiples of 8, up to 256."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        output, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal=True)
        sequence_ends_and_lengths, dropout_state = rest[:4], rest[4:6]
        return Attended(output, lse, (*sequence_ends_and_lengths, 0.0, True, *dropout_state))

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended) -> Gradients:
        return Gradients(
            *torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, attended.output, attended.lse, *attended.rest
            )
        )


CAUSAL_KERNELS: dict[str, CausalKernel] = {"cpu": CpuFlash(), "cuda": CudaFlash()}
"""By type of device; on others there is none."""
