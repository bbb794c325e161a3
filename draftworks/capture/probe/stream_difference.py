"""How far a captured stream is from what the target's weights give, and how far it may be.

A stream of large models has a few channels that are a thousand times the others, and rows (the first token's) that are
as large. So every channel is measured by its usual size, and a prompt's difference is that of its middle row: one row
whose expert was decided by rounding says nothing of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.capture.probe.streamed_forward import Streams

FLOORS = {torch.float64: 1e-8, torch.float32: 5e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""A stream may differ by so much in any case: kernels add up in other orders, and tensor cores cut float32 short. From
benchmarks/probe_sensitivity.py."""
NOISE_FACTOR = 5.0
"""Or by so many times what rounding alone does to the same prompts of the same target. An engine that computes in bfloat16
throughout differed by up to 2.7 times that, over random models of twelve families."""
CEILING = 0.5
"""But never by more."""
_NEARER = 0.5
_QUIET = 0.1
_SMALLEST_CHANNEL = 1e-2
"""Of the usual channel: a dead one's rounding would count as much as a live one's content."""


@dataclass(frozen=True)
class KnownStream:
    """A stream of some prompts by the target's own weights.

    Attributes:
        rows: of each prompt (S, H).
        scale: (H,), the usual size of each channel.
        allowed: largest `difference` of what an engine may capture in its dtype.
    """

    rows: tuple[Tensor, ...]
    scale: Tensor
    allowed: float

    def measure_difference(self, found: Sequence[Tensor]) -> float:
        """Root mean square over channels of what `found` differs by, as a share of the stream's own: of the middle row
        of the prompt that differs most.
        """
        return max(self._measure_prompt(row, other) for row, other in zip(self.rows, found, strict=True))

    def _measure_prompt(self, row: Tensor, found: Tensor) -> float:
        own = (row / self.scale).norm(dim=1).clamp_min(1e-12)
        return float((((found.to(row.dtype) - row) / self.scale).norm(dim=1) / own).median())


def build_known_streams(streams: Streams, dtype: torch.dtype) -> dict[str, KnownStream]:
    """What an engine that computes in `dtype` is compared with, by stream name."""
    known = {}
    for name, rows in streams.exact.items():
        size = torch.cat(rows).abs().median(dim=0).values
        scale = size.clamp_min(float(size.median()) * _SMALLEST_CHANNEL).clamp_min(1e-12)
        noise = KnownStream(tuple(rows), scale, 0.0).measure_difference(streams.rounded[name])
        known[name] = KnownStream(tuple(rows), scale, min(max(FLOORS[dtype], NOISE_FACTOR * noise), CEILING))
    return known


@dataclass(frozen=True)
class StreamFinding:
    """One captured stream beside the known ones.

    Attributes:
        difference, allowed: see `KnownStream`.
        nearer: the known stream that the captured one is clearly nearer to than to its own; empty if there is none.
        zero: whether it holds nothing but zeros.
    """

    name: str
    difference: float
    allowed: float
    nearer: str
    nearer_difference: float
    zero: bool

    @property
    def sound(self) -> bool:
        return self.difference <= self.allowed and not self.nearer

    def describe(self) -> str:
        if self.zero:
            return f"stream {self.name} is all zero"
        told = f"stream {self.name} differs by {self.difference:.2g} of its size, expected at most {self.allowed:.2g}"
        return f"{told}; it is {self.nearer} (difference {self.nearer_difference:.2g})" if self.nearer else told


def compare_stream(name: str, found: Sequence[Tensor], known: Mapping[str, KnownStream]) -> StreamFinding:
    """Compare a captured stream, of each prompt (S, H), with the known one of its name and with the others."""
    own = known[name]
    difference = own.measure_difference(found)
    others = {other: each.measure_difference(found) for other, each in known.items() if other != name}
    nearest = min(others, key=others.__getitem__, default="")
    nearer = nearest and not difference <= own.allowed * _QUIET and others[nearest] < difference * _NEARER
    zero = not any(bool(row.any()) for row in found)
    return StreamFinding(
        name,
        difference,
        own.allowed,
        nearest if nearer and others[nearest] <= CEILING else "",
        others.get(nearest, 0.0),
        zero,
    )
