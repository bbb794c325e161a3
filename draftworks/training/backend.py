"""Training backends: how a draft is distributed over processes. That of several is in `fsdp_backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draftworks.drafts.strategy import DraftStrategy


class TrainingBackend(ABC):
    """Wraps a strategy's model for training. Gradients are *sums* over micro-steps and ranks, never means."""

    device: torch.device
    """The device of this rank."""

    @abstractmethod
    def prepare_model(self, strategy: DraftStrategy) -> None:
        """Move and wrap `strategy.model` in place. Weights must be loaded before."""

    @abstractmethod
    def backward(self, loss: Tensor, *, is_boundary: bool = True) -> None:
        """Add the gradient of `loss`; the ranks' gradients are summed at a boundary only."""

    @abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return trainable parameters by name as the optimizer needs them: fp32, this rank's shard."""

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights on the CPU of rank 0, an empty dict on the others. A collective."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply the summed gradients by `factor`, before clipping."""
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


class SingleTrainingBackend(TrainingBackend):
    """One process in fp32: its parameters are the masters. Imports nothing of torch's that several ranks need.

    Not for bf16: FSDP adds in fp32 what a block gives that is called several times in a pass, autograd alone in bf16.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._model: nn.Module | None = None

    def prepare_model(self, strategy: DraftStrategy) -> None:
        self._model = strategy.model.to(self.device).float()

    def backward(self, loss: Tensor, *, is_boundary: bool = True) -> None:
        loss.backward()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {name: p for name, p in self._require_model().named_parameters() if p.requires_grad}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return copies, which later steps do not change."""
        return {name: t.detach().to("cpu", copy=True) for name, t in self._require_model().state_dict().items()}

    def _require_model(self) -> nn.Module:
        if self._model is None:
            raise RuntimeError("prepare_model has not been called")
        return self._model


@contextmanager
def ensure_process_group(device: torch.device) -> Iterator[None]:
    """Context with a process group: the initialised one, or an in-memory group of this process, destroyed at exit.

    So FSDP, its masters and its precision in bf16 are the same for one process as for many.
    """
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
