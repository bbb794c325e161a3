"""torch.compile over the blocks of a draft: fewer passes over memory between the matrix products, the same numbers to rounding."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftworks.drafts.layers import GatedMlp, RmsNorm
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.torch_compile import compile_for_many_kinds

log = logging.getLogger(__name__)


def compile_blocks(
    strategy: DraftStrategy, device: torch.device, backend: str | Callable[..., Any] = "inductor"
) -> bool:
    """Compile the forward of each block in place, before FSDP wraps them; names and weights stay as they are.

    Where there is no compiler for the device (a C++ one for a CPU, Triton for a GPU) a warning says so, and nothing is changed.

    Args:
        backend: of torch.compile.

    Returns:
        Whether the blocks are compiled now.
    """
    problem = _problem(device, backend)
    if problem is not None:
        log.warning(
            "training.compile: torch.compile does not work here on %s, so the draft is trained without it: %s. Install a "
            "compiler (g++ for a CPU, triton for a GPU), or set training.compile to false",
            device.type,
            problem,
        )
        return False
    for block in find_compilable_blocks(strategy):
        block.forward = _where_it_learns(block.forward, compile_for_many_kinds(block.forward, backend=backend))
    return True


def find_compilable_blocks(strategy: DraftStrategy) -> Sequence[nn.Module]:
    """The strategy's FSDP blocks. Where it has none because they are not called as modules: what they are made of."""
    parts = (module for module in strategy.model.modules() if isinstance(module, (GatedMlp, RmsNorm)))
    return strategy.fsdp_blocks() or tuple(parts)


def _where_it_learns(plain: Callable[..., Tensor], fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Evaluations come in many more shapes, and each kind of them would be compiled for: only the training's are."""

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return (fast if torch.is_grad_enabled() else plain)(*args, **kwargs)

    return forward


def _problem(device: torch.device, backend: str | Callable[..., Any]) -> str | None:
    """Why a small function cannot be compiled and differentiated; None if it can."""
    x = torch.ones(4, device=device, requires_grad=True)
    try:
        torch.compile(lambda x: (x * 2).sin().sum(), backend=backend)(x).backward()
    except Exception as error:  # torch has many kinds, and lets those of compilers through
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None
