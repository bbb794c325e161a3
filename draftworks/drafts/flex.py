"""torch's flex attention: a kernel compiled for a mask, which skips the score tiles that the mask leaves out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.layers import compile_for_many_kinds
from draftworks.errors import ConfigError

log = logging.getLogger(__name__)

_PROBED = 160
"""Queries of the probe: more than a tile of the kernels, and no multiple of one."""


def get_flex_attention(device_type: str) -> Callable[..., Tensor]:
    """Return flex attention, compiled on a GPU; on a CPU it runs as it is, without gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compile_flex(torch.is_grad_enabled()) if device_type == "cuda" else flex_attention


@functools.cache
def _compile_flex(training: bool) -> Callable[..., Tensor]:
    """Compile one function for training and one for evaluation, whose arguments come in many more kinds."""
    from torch.nn.attention.flex_attention import flex_attention

    def training_attention(*args: Any, **kwargs: Any) -> Tensor:
        return flex_attention(*args, **kwargs)

    def evaluation_attention(*args: Any, **kwargs: Any) -> Tensor:
        return flex_attention(*args, **kwargs)

    return compile_for_many_kinds(training_attention if training else evaluation_attention)


@functools.cache
def get_block_mask_factory(device_type: str) -> Callable[..., Any]:
    """Return torch's `create_block_mask`; compiled on a GPU, as eager it holds every mask element as int64, several
    times.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    return compile_for_many_kinds(create_block_mask) if device_type == "cuda" else create_block_mask


def check_flex(strategy: str, device: torch.device) -> None:
    """Raise ConfigError for gradients on a CPU, where flex attention has none."""
    if device.type == "cpu" and torch.is_grad_enabled():
        raise ConfigError(
            f"{strategy}: attention flex has no gradients on a CPU: set options.attention to sdpa or auto"
        )


@functools.cache
def flex_works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `auto` may choose flex attention: on a GPU, in a 2-byte dtype, where a probe equals plain attention.

    Wider dtypes can exceed the shared memory of a multiprocessor. The probe compares output and gradients on a small
    batch row, once; where it fails, a warning says why.
    """
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    try:
        problem = None if _flex_equals_sdpa(device, dtype, head_size) else "its results differ from sdpa's"
    except Exception as error:  # no compiler, no Python.h, a head size that it cannot do: torch lets many kinds through
        problem = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
    if problem is not None:
        log.warning(
            "flex attention does not work here for %s and head size %d (%s): using sdpa, which is slower. Triton needs a C "
            "compiler and Python's headers",
            dtype,
            head_size,
            problem,
        )
    return problem is None


@torch.enable_grad()
def _flex_equals_sdpa(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q

    mask = create_block_mask(causal, None, None, _PROBED, _PROBED, device=device.type)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, _PROBED, head_size, generator=generator).to(device, dtype) for heads in (4, 2, 2)]
    groups = [4 // x.shape[1] for x in inputs]
    results = []
    for flex in (True, False):
        query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
        if flex:
            output = get_flex_attention(device.type)(query, key, value, block_mask=mask, enable_gqa=True)
        else:
            every_head = [x.repeat_interleave(times, dim=1) for x, times in zip(leaves, groups, strict=True)]
            output = F.scaled_dot_product_attention(every_head[0], every_head[1], every_head[2], is_causal=True)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
    return all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(*results, strict=True))
