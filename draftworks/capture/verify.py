"""Checks of captured streams: shape, dtype, finite values, and agreement of `last` with the target's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftworks.capture.engine import TargetEngine
from draftworks.errors import CaptureError, UnsoundEngineError
from draftworks.features.contracts import CaptureConfig

HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference between the head on `last` and the target's logits, as a share of the largest logit."""


def verify_capture(config: CaptureConfig, sample_id: str, streams: Mapping[str, Tensor], num_tokens: int) -> None:
    """Check the names, order, width and dtype of a sample's streams, and that every position has finite values.

    Args:
        streams: by stream name, (S, H) each, with S = `num_tokens`.

    Raises:
        UnsoundEngineError: names, order, width or dtype are not as configured, which is not the sample's fault.
        CaptureError: positions are missing, values are not finite or all zero; the message names sample and stream.
    """
    if tuple(streams) != config.names:
        raise UnsoundEngineError(
            f"sample {sample_id}: expected the streams {', '.join(config.names)}, found {', '.join(streams) or 'none'}"
        )
    for name, tensor in streams.items():
        where = f"sample {sample_id}, stream {name}"
        found = (tensor.shape[-1] if tensor.dim() else 0, str(tensor.dtype).removeprefix("torch."))
        if tensor.dim() != 2 or found != (config.hidden_size, config.dtype):
            raise UnsoundEngineError(
                f"{where}: expected (positions, {config.hidden_size}) in {config.dtype}, found {tuple(tensor.shape)} "
                f"in {found[1]}"
            )
        if len(tensor) != num_tokens:
            raise CaptureError(f"{where}: expected {num_tokens} positions, one for each token, found {len(tensor)}")
        if not tensor.any():
            raise CaptureError(f"{where}: all {tensor.numel()} values are zero, expected hidden states")
        if not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            raise CaptureError(f"{where}: {count} of {tensor.numel()} values are not finite. {_advise(config.dtype)}")


def _advise(dtype: str) -> str:
    if dtype == "float32":
        return "It was computed in float32: the engine may have built another model than config.json says"
    return f"Capture with compute_dtype float32 instead of {dtype}, or leave the sample out"


def check_head(
    engine: TargetEngine, sample_ids: Sequence[str], sequences: Sequence[Sequence[int]], last: Sequence[Tensor]
) -> None:
    """Check that the target's head on the captured `last` gives the logits of a separate, plain forward pass.

    Args:
        last: (S, H) per sequence, as the engine returned it, before it is stored in another dtype.

    Raises:
        CaptureError: `last` is not what the head reads (wrong norm convention), or the target changes its logits after
            the head (softcap, scaling).
    """
    for sample_id, sequence, hidden in zip(sample_ids, sequences, last, strict=True):
        expected = engine.logits([sequence])[0].double()  # (R, V), the last R positions
        found = engine.head_logits(hidden[-len(expected) :]).double()  # (R, V)
        scale = max(1.0, float(expected.abs().max()))
        difference = float((expected - found).abs().max()) / scale
        allowed = HEAD_TOLERANCE[hidden.dtype]
        if not difference <= allowed:
            raise CaptureError(
                f"sample {sample_id}, stream last: the target's head on it differs from the target's logits by "
                f"{difference:.2g} of the largest logit, expected at most {allowed:g} in {hidden.dtype}. Either the "
                "stream is before the final norm, or the target scales or caps its logits after the head."
            )
