"""The same step on a CPU in fp32 and elsewhere in fp32 and bf16: differences of losses, gradients and proposals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gpu_cases import SHAPES, made_up_draft, made_up_samples, made_up_target, names_of
from gpu_steps import CONTEXT
from torch import Tensor
from torch.distributed.tensor import DTensor

from draftworks.drafts.documents import Documents
from draftworks.drafts.strategy import DraftStrategy
from draftworks.features.contracts import TrainBatch
from draftworks.training.backend import ensure_process_group
from draftworks.training.fsdp_backend import FSDPTrainingBackend

LENGTHS = (70, 33, 52)
COUNT = 3
"""Tokens proposed at every supervised position."""


@dataclass(frozen=True)
class Step:
    """Results of a step on the CPU: loss, whole gradients by name, and proposals (positions, COUNT)."""

    loss: float
    gradients: dict[str, Tensor]
    proposals: Tensor


@dataclass(frozen=True)
class Difference:
    """Difference between two steps.

    Attributes:
        loss: relative.
        gradient: 1 - cosine, over all parameters together.
        proposals: share of differing tokens.
    """

    strategy: str
    device: str
    dtype: str
    layout: str
    loss: float
    gradient: float
    proposals: float


def differences(name: str, device: torch.device) -> Iterator[Difference]:
    """Compare the device, in both dtypes and layouts, with the CPU in fp32, padded. The draft is a small one."""
    with ensure_process_group(device), exact_products():
        reference = small_step(name, torch.device("cpu"), "float32", "padded", sharded=False)
        for dtype in ("float32", "bfloat16"):
            for layout in ("padded", "packed"):
                found = small_step(name, device, dtype, layout)
                yield difference(name, device, dtype, layout, found, reference)


def small_step(
    name: str, device: torch.device, dtype: str, layout: str, attention: str = "auto", sharded: bool = True
) -> Step:
    """Run forward, backward and proposals of an untrained draft.

    Args:
        sharded: wrap by FSDP as the trainer does, which is what applies `dtype`; needs a process group. Otherwise plain
            parameters in `dtype`.
    """
    shape = SHAPES["tiny"]
    strategy = made_up_draft(name, shape, made_up_target(shape), attention=attention)
    samples = made_up_samples(strategy, shape, LENGTHS)
    lay = strategy.pack if layout == "packed" else strategy.collate
    batch = lay(samples, names_of(samples)).to(device)
    if sharded:
        backend = FSDPTrainingBackend(device, getattr(torch, dtype))
        backend.prepare_model(strategy)
    else:
        strategy.model.to(device, getattr(torch, dtype))
    output = strategy.forward_loss(batch, CONTEXT)
    output.loss_sum.backward()
    gradients = {n: _whole(p.grad) for n, p in strategy.model.named_parameters() if p.grad is not None}
    return Step(float(output.loss_sum.detach()), gradients, collect_proposals(strategy, batch))


def collect_proposals(strategy: DraftStrategy, batch: TrainBatch) -> Tensor:
    """Return the proposals at every supervised position but the sample's last, (positions, COUNT), on the CPU."""
    rows = batch["loss_mask"] & Documents.of(batch).shift_left(batch["loss_mask"], 1)
    with torch.no_grad():
        return strategy.propose(batch, rows, COUNT)[rows].cpu()


def difference(name: str, device: torch.device, dtype: str, layout: str, found: Step, reference: Step) -> Difference:
    return Difference(
        name,
        device.type,
        dtype,
        layout,
        loss=abs(found.loss - reference.loss) / abs(reference.loss),
        gradient=1 - cosine(found.gradients, reference.gradients),
        proposals=float((found.proposals != reference.proposals).double().mean()),
    )


def cosine(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Cosine of two gradients over all parameters, in float64."""
    one, other = (torch.cat([side[name].double().flatten() for name in sorted(right)]) for side in (left, right))
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


@contextmanager
def exact_products() -> Iterator[None]:
    """Context of fp32 without TF32: a GPU may otherwise keep ten mantissa bits, in cuDNN's GRU by default."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn


def _whole(gradient: Tensor) -> Tensor:
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.detach().cpu()
