"""torch.compile over a draft's blocks: fewer memory passes between matrix products, equal to rounding."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftworks.drafts.layers import GatedMlp, RmsNorm, compile_for_many_kinds
from draftworks.drafts.strategy import DraftStrategy

log = logging.getLogger(__name__)


def compile_blocks(
    strategy: DraftStrategy, device: torch.device, backend: str | Callable[..., Any] = "inductor"
) -> bool:
    """Compile the forward of each block in place, before FSDP wraps them; names and weights are unchanged.

    Where the device has no compiler (C++ for a CPU, Triton for a GPU), or torch's gives wrong gradients, log a warning and
    change nothing.

    Args:
        backend: of torch.compile.

    Returns:
        Whether the blocks are compiled.
    """
    problem = _problem(device, backend)
    if problem is not None:
        log.warning(
            "training.compile: torch.compile does not work here on %s, so the draft is trained without it: %s. Install a "
            "compiler (g++ for a CPU, triton for a GPU) or another torch, or set training.compile to false",
            device.type,
            problem,
        )
        return False
    for block in find_compilable_blocks(strategy):
        block.forward = _compiled_in_training(block.forward, compile_for_many_kinds(block.forward, backend=backend))
    return True


def find_compilable_blocks(strategy: DraftStrategy) -> Sequence[nn.Module]:
    """Return the strategy's FSDP blocks; where it has none (blocks not called as modules), their parts."""
    parts = (module for module in strategy.model.modules() if isinstance(module, (GatedMlp, RmsNorm)))
    return strategy.fsdp_blocks() or tuple(parts)


def _compiled_in_training(plain: Callable[..., Tensor], fast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Use the compiled forward in training only: evaluations have many more shapes, each compiled anew."""

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return (fast if torch.is_grad_enabled() else plain)(*args, **kwargs)

    return forward


def _problem(device: torch.device, backend: str | Callable[..., Any]) -> str | None:
    """Return why a small block cannot be compiled and differentiated; None if it can."""
    try:
        norm, mlp = RmsNorm(8, 1e-6).to(device), GatedMlp(8, 8, torch.Generator().manual_seed(0)).to(device)
        plain, fast = (
            _find_gradient(block, device)
            for block in ((lambda x: mlp(norm(x))), torch.compile(lambda x: mlp(norm(x)), backend=backend))
        )
    except Exception as error:  # torch raises many types, and passes on those of compilers
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if not torch.allclose(plain, fast, rtol=1e-2, atol=1e-3):  # also of products in TF32
        return f"torch {torch.__version__} compiles a small block whose gradient is {fast.norm():.4g}, not {plain.norm():.4g}"
    return None


def _find_gradient(block: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    x = torch.linspace(-1, 1, 16).reshape(2, 8).to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(block(x).square().sum(), x)
    return gradient
