"""Checks that what was captured can be what training believes it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftworks.capture.engine import TargetEngine
from draftworks.errors import CaptureError

HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference between the head on `last` and the target's logits, as a share of the largest logit."""


def check_sample(sample_id: str, streams: Mapping[str, Tensor], num_tokens: int, hidden_size: int) -> None:
    """Every stream has one row per token, is as wide as the target, and is finite.

    Raises:
        CaptureError: with sample and stream named.
    """
    for name, tensor in streams.items():
        expected = (num_tokens, hidden_size)
        if tuple(tensor.shape) != expected:
            raise CaptureError(
                f"sample {sample_id}, stream {name}: expected {expected} (tokens, hidden size), found {tuple(tensor.shape)}"
            )
        if not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            raise CaptureError(
                f"sample {sample_id}, stream {name}: {count} of {tensor.numel()} values are not finite. "
                "Capture with compute_dtype float32, or leave the sample out."
            )


def check_head(
    engine: TargetEngine, sample_ids: Sequence[str], token_rows: Sequence[Sequence[int]], last: Sequence[Tensor]
) -> None:
    """The target's own head on the captured `last` gives the logits of a separate, plain forward pass.

    Args:
        last: as the engine returned it, before it is stored in another dtype.

    Raises:
        CaptureError: `last` is not what the head reads (wrong norm convention), or the target changes its logits after
            the head (softcap, scaling).
    """
    for sample_id, row, hidden in zip(sample_ids, token_rows, last, strict=True):
        expected = engine.logits([row])[0].double()
        found = engine.head_logits(hidden[-len(expected) :]).double()
        scale = max(1.0, float(expected.abs().max()))
        difference = float((expected - found).abs().max()) / scale
        allowed = HEAD_TOLERANCE[hidden.dtype]
        if not difference <= allowed:
            raise CaptureError(
                f"sample {sample_id}, stream last: the target's head on it differs from the target's logits by "
                f"{difference:.2g} of the largest logit, expected at most {allowed:g} in {hidden.dtype}. Either the "
                "stream is before the final norm, or the target scales or caps its logits after the head."
            )
