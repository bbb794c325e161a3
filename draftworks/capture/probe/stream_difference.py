"""Difference between a captured stream and the one that the target's weights give, and its allowed limit.

A stream of a large model has a few channels that are a thousand times as large as the others, and positions (the first
token's) that are as large. So every channel is divided by its usual size, and a prompt's difference is the median over
its positions: a single position whose expert was decided by rounding is no evidence about the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.capture.probe.streamed_forward import Streams

FLOORS = {torch.float64: 1e-8, torch.float32: 5e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Difference that is always allowed, by dtype: kernels add in other orders, and tensor cores truncate float32.

The values come from benchmarks/probe_sensitivity.py.
"""
NOISE_FACTOR = 5.0
"""Allowed difference as a multiple of what rounding alone causes for the same prompts of the same target.

The larger of this and the floor is allowed. An engine that computes in bfloat16 throughout differed by up to 2.7 times
the rounding difference, over random models of twelve families.
"""
CEILING = 0.5
"""Upper limit of the allowed difference."""
_NEARER = 0.5
"""Another stream is clearly nearer if its difference is below this share of the own one's."""
_NEGLIGIBLE = 0.1
"""A difference up to this share of the allowed one is accepted, even if another stream is nearer."""
_SMALLEST_CHANNEL = 1e-2
"""Smallest scale of a channel, as a share of the median channel's.

Without it, the rounding of a dead channel would count as much as the content of a live one.
"""


@dataclass(frozen=True)
class KnownStream:
    """A stream of some prompts, computed with the target's own weights.

    Attributes:
        prompts: the stream of each prompt, (S, H).
        scale: (H,), the usual size of each channel.
        allowed: largest allowed difference of a stream that an engine captures in its dtype.
    """

    prompts: tuple[Tensor, ...]
    scale: Tensor
    allowed: float

    def measure_difference(self, found: Sequence[Tensor]) -> float:
        """Return the relative difference of `found`, (S, H) per prompt, from this stream.

        A position's difference is the root mean square over channels of the difference, divided by that of the stream
        itself. A prompt's difference is the median over its positions; the largest one over the prompts is returned.
        """
        return max(self._measure_prompt(own, other) for own, other in zip(self.prompts, found, strict=True))

    def _measure_prompt(self, own: Tensor, found: Tensor) -> float:
        size = (own / self.scale).norm(dim=1).clamp_min(1e-12)  # (S,)
        return float((((found.to(own.dtype) - own) / self.scale).norm(dim=1) / size).median())


def build_known_streams(streams: Streams, dtype: torch.dtype) -> dict[str, KnownStream]:
    """Return the streams, by name, with which an engine that computes in `dtype` is compared."""
    known = {}
    for name, prompts in streams.exact.items():
        size = torch.cat(prompts).abs().median(dim=0).values  # (H,)
        scale = size.clamp_min(float(size.median()) * _SMALLEST_CHANNEL).clamp_min(1e-12)
        noise = KnownStream(tuple(prompts), scale, 0.0).measure_difference(streams.rounded[name])
        known[name] = KnownStream(tuple(prompts), scale, min(max(FLOORS[dtype], NOISE_FACTOR * noise), CEILING))
    return known


@dataclass(frozen=True)
class StreamFinding:
    """Result of comparing one captured stream with the known ones.

    Attributes:
        difference: see `KnownStream.measure_difference`.
        allowed: see `KnownStream`.
        nearer: name of another known stream that the captured one is clearly nearer to than to the one of its own name;
            empty if there is none.
        nearer_difference: difference from the nearest other known stream; 0 if there is no other.
        zero: whether the captured stream is all zeros.
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
            return f"stream {self.name} is all zeros"
        message = (
            f"stream {self.name} differs by {self.difference:.2g} of its size, expected at most {self.allowed:.2g}"
        )
        return f"{message}; it is {self.nearer} (difference {self.nearer_difference:.2g})" if self.nearer else message


def compare_stream(name: str, found: Sequence[Tensor], known: Mapping[str, KnownStream]) -> StreamFinding:
    """Compare a captured stream, (S, H) per prompt, with the known one of its name and with the others."""
    own = known[name]
    difference = own.measure_difference(found)
    others = {other: each.measure_difference(found) for other, each in known.items() if other != name}
    nearest = min(others, key=others.__getitem__, default="")
    nearer = nearest and not difference <= own.allowed * _NEGLIGIBLE and others[nearest] < difference * _NEARER
    zero = not any(bool(states.any()) for states in found)
    return StreamFinding(
        name,
        difference,
        own.allowed,
        nearest if nearer and others[nearest] <= CEILING else "",
        others.get(nearest, 0.0),
        zero,
    )
