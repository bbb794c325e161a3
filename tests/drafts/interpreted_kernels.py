"""Fused losses in Triton's interpreter beside torch's, as JSON: `python interpreted_kernels.py`, with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from gpu_cases import engine_strategies
from gpu_equivalence import Step, cosine, small_step
from torch import Tensor

from draftworks.drafts import logit_losses
from draftworks.drafts.fused_losses import LANES, FusedComparison, FusedLabels, sum_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((3, 2 * LANES + 5), (4, LANES), (1, 7), (2, 1), (0, 50))
"""Rows and logits: of more than a tile, of one, of fewer, of one logit, and no rows."""


def draw(*shape: int) -> Tensor:
    return 3 * torch.randn(shape)


def measure_functions() -> Iterator[dict[str, Any]]:
    """Largest differences of each function; gradients relative to the largest."""
    for dtype in DTYPES:
        for rows, vocab in SIZES:
            logits, taught = draw(rows, vocab).to(dtype), draw(2, vocab).to(dtype)
            if vocab > 5:
                logits[:1, 2] = -torch.inf  # a token that is masked
                logits[1:2, : LANES // 2] = -torch.inf
                logits[2:3, 5] = logits[2:3].amax(-1)  # a tie
            labels, which = torch.randint(4 if vocab > 5 else 1, (rows,)) + max(0, vocab - 4), torch.arange(rows) % 2
            ids = torch.stack([labels, torch.randint(vocab, (rows,)).clamp_min(vocab // 2), labels], dim=1)
            weights = torch.randn(rows, 3)
            wide, leaf = (x.detach().clone().requires_grad_() for x in (logits.float(), logits))
            found, argmax = FusedLabels.apply(leaf.clone(), ids)
            expected = wide.log_softmax(-1).gather(-1, ids)
            sums = sum_rows(logits, 0.5)
            yield {
                "what": f"labels {dtype} {rows} x {vocab}",
                "values": far(found, expected),
                "gradient": far_gradient((found * weights).sum(), leaf, (expected * weights).sum(), wide),
                "argmax": int((argmax != logits.float().argmax(-1)).sum()) if rows else 0,
                "scaled": far(sums.lse, (logits.float() * 0.5).logsumexp(-1)),
            }
            wide, leaf = (x.detach().clone().requires_grad_() for x in (logits.float(), logits))
            found = torch.stack(FusedComparison.apply(leaf.clone(), ids[:, 0], taught, which, 0.5))
            p, q = wide.softmax(-1), (taught.float() * 0.5).softmax(-1)[which]
            ce = wide.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            expected = torch.stack([ce, (p - q).abs().sum(-1) / 2])
            loss, other = ((each * weights.T[:2]).sum() for each in (found, expected))
            yield {
                "what": f"comparison {dtype} {rows} x {vocab}",
                "values": far(found, expected),
                "gradient": far_gradient(loss, leaf, other, wide),
            }


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) if found.numel() else 0.0


def far_gradient(loss: Tensor, leaf: Tensor, expected_loss: Tensor, wide: Tensor) -> float:
    """Largest difference from what torch finds and rounds once to the dtype, of its largest."""
    found, expected = torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected_loss, wide)[0]
    if not found.numel():
        return 0.0
    return float((found.float() - expected.to(found.dtype).float()).abs().max() / expected.abs().max().clamp_min(1e-3))


def measure_strategies() -> Iterator[dict[str, Any]]:
    """A step in bf16 of every strategy with the kernels, beside one without."""
    plain = logit_losses.kernels_work
    for name in engine_strategies():
        steps: list[Step] = []
        for works in (plain, lambda device, dtype: True):
            logit_losses.kernels_work = works
            steps.append(small_step(name, torch.device("cpu"), "bfloat16", "packed", "eager", sharded=False))
        without, with_kernels = steps
        cos = cosine(with_kernels.gradients, without.gradients)
        yield {"what": name, "loss": abs(with_kernels.loss / without.loss - 1), "gradient": 1 - cos}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    json.dump([*measure_functions(), *measure_strategies()], sys.stdout)
