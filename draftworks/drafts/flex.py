"""torch's flex attention, where a draft asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from draftworks.errors import ConfigError


@functools.cache
def flex_attention_on(device_type: str) -> Callable[..., Tensor]:
    """Compiled where that is what makes it fast; on a CPU it runs as it is, without gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


def check_flex(strategy: str, device: torch.device) -> None:
    """ConfigError with gradients on a CPU, where flex attention has none."""
    if device.type == "cpu" and torch.is_grad_enabled():
        raise ConfigError(
            f"{strategy}: attention flex has no gradients on a CPU: set options.attention to sdpa or auto"
        )
