"""Checks of captured streams: shape, dtype, finite values, and agreement of `last` with the target's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftworks.capture.engine import TargetEngine
from draftworks.errors import CaptureError, UnsoundEngineError
from draftworks.features.contracts import CaptureConfig

HEAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference between the head on `last` and the target's logits, as a share of the largest logit."""
_VALUES_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class _FloatLayout:
    """A floating point format: the integers of its width, the mask of all bits but the sign, and infinity's bits."""

    integer: torch.dtype
    without_sign: int
    infinity: int


_LAYOUTS = {
    torch.float64: _FloatLayout(torch.int64, (1 << 63) - 1, 0x7FF << 52),
    torch.float32: _FloatLayout(torch.int32, (1 << 31) - 1, 0xFF << 23),
    torch.bfloat16: _FloatLayout(torch.int16, (1 << 15) - 1, 0xFF << 7),
    torch.float16: _FloatLayout(torch.int16, (1 << 15) - 1, 0x1F << 10),
}


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
        largest, infinite = find_largest_bits(tensor), _LAYOUTS[tensor.dtype].infinity
        if largest == 0:
            raise CaptureError(f"{where}: all {tensor.numel()} values are zero, expected hidden states")
        if largest >= infinite:
            count = int((~torch.isfinite(tensor)).sum())
            raise CaptureError(f"{where}: {count} of {tensor.numel()} values are not finite. {_advise(config.dtype)}")


def find_largest_bits(tensor: Tensor) -> int:
    """Return the largest absolute value of a floating point tensor as the integer of the same bits.

    It is 0 if all values are zero, and at least that of infinity if one is not finite. One pass over the memory, at
    several times the speed of `isfinite` and `any`, which were half of the time that a client had for a token.
    """
    layout = _LAYOUTS[tensor.dtype]
    bits = tensor.detach().reshape(-1).view(layout.integer).numpy()
    buffer, largest = np.empty(min(len(bits), _VALUES_AT_ONCE), bits.dtype), 0
    for start in range(0, len(bits), _VALUES_AT_ONCE):
        values = bits[start : start + _VALUES_AT_ONCE]
        without_sign = np.bitwise_and(values, layout.without_sign, out=buffer[: len(values)])
        largest = max(largest, int(without_sign.max()))
    return largest


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
