"""Compare the streams that an engine captures with the target's own weights, tap by tap, on a few short prompts.

An engine's logits agree with its own hidden states whatever weights it has loaded, and whichever layer it calls hf3.
So the layers are run again here, from the target's files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftworks.capture.engine import TargetEngine
from draftworks.capture.probe.streamed_forward import StreamedTarget, Streams
from draftworks.capture.verify import verify_capture
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenRow
from draftworks.errors import CaptureError, StoreError, UnsoundEngineError
from draftworks.features.contracts import CaptureConfig
from draftworks.storage.identity import LayerTap
from draftworks.targets.safetensors_headers import explain_unprobable

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


PROMPT_TOKENS = (64, 24, 24)
"""Largest number of tokens of each probe prompt."""
_GB = 1e9

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeReport:
    """Result of a probe.

    Attributes:
        differences: difference of each compared stream, by name, as a share of its size; see
            `KnownStream.measure_difference`.
        allowed: largest allowed difference of each compared stream, by name.
        not_compared: names of the captured streams that were not compared.
        reason: why these were not compared; empty if all were.
    """

    differences: Mapping[str, float]
    allowed: Mapping[str, float]
    not_compared: tuple[str, ...] = ()
    reason: str = ""

    def describe(self) -> str:
        left = f"{', '.join(self.not_compared)} not compared with the target's own weights: {self.reason}"
        if not self.differences:
            return left
        worst = max(self.differences, key=lambda name: self.differences[name] / self.allowed[name])
        compared = (
            f"{', '.join(self.differences)} agree with the target's own weights: {worst} differs most, by "
            f"{self.differences[worst]:.2g} of its size (allowed: {self.allowed[worst]:.2g})"
        )
        return f"{compared}; {left}" if self.not_compared else compared

    def to_json(self) -> dict[str, Any]:
        """Return the fields for the capture's report and the metadata of its check."""
        return {
            "probe": self.describe(),
            "probe_compared": ", ".join(self.differences),
            "probe_not_compared": ", ".join(self.not_compared),
            "probe_differences": json.dumps({name: float(f"{found:.3g}") for name, found in self.differences.items()}),
        }


@dataclass(frozen=True)
class _Reference:
    """Streams from the target's own weights, the names of those to compare, and why the others are not compared."""

    known: Mapping[str, KnownStream]
    compared: tuple[str, ...]
    reason: str


class EngineProbe:
    """Comparison of engines with one target's weights, which are read when the first engine is compared.

    Args:
        tokens: samples of the set that is captured; the prompts are cut out of some of them.
    """

    def __init__(self, run: CaptureRun, tokens: Sequence[TokenRow]) -> None:
        self._target = run.target
        self._capture = run.capture
        self._prompts = choose_probe_prompts(tokens)
        self._taps = tuple(LayerTap(k) for k in sorted(set(run.taps)))
        self._config = CaptureConfig(
            tuple(tap.hf_index for tap in self._taps), run.target.hidden_size, run.capture.compute_dtype
        )
        self._reference: _Reference | None = None

    def compare(self, engine: TargetEngine) -> ProbeReport:
        """Capture the prompts' streams from each server of an engine separately, and compare them.

        Raises:
            UnsoundEngineError: a stream differs too much from the one that the target's weights give; or no stream can
                be compared, and `capture.allow_unprobed` is not set or the engine's version is untested.
            EngineError: the engine gives no answer.
            StoreError: the target's files are damaged or lack a tensor.
        """
        reason = explain_unprobable(self._target, self._capture.server.args)
        if reason:
            return self._report_unprobed(reason, engine)
        try:
            reference = self._reference = self._reference or self._read_reference()
        except StoreError:
            raise
        except Exception as error:  # a family that transformers does not know, or whose code needs a GPU
            return self._report_unprobed(f"its layers cannot be run here: {type(error).__name__}: {error}", engine)
        if not reference.compared:
            return self._report_unprobed(reference.reason, engine)
        findings = [finding for each in engine.list_members() for finding in self._compare_streams(each, reference)]
        worst = {name: max((f for f in findings if f.name == name), key=_measure_excess) for name in reference.compared}
        left = tuple(name for name in self._config.names if name not in reference.compared)
        report = ProbeReport(
            {name: finding.difference for name, finding in worst.items()},
            {name: finding.allowed for name, finding in worst.items()},
            left,
            reference.reason if left else "",
        )
        log.info("probe: %s", report.describe())
        return report

    def confirm(self, engine: TargetEngine) -> None:
        """Repeat the comparison if `compare` could compare any stream. Raises the same errors as `compare`."""
        if self._reference is not None and self._reference.compared:
            self.compare(engine)

    def _report_unprobed(self, reason: str, engine: TargetEngine) -> ProbeReport:
        if not engine.tested:
            raise UnsoundEngineError(
                f"target {self._target.name}: {engine.display_name} is of a version that Draftworks was not tested with, and "
                f"what it captures cannot be compared with the target's own weights: {reason}. Use a version that "
                "docs/sglang.md names"
            )
        if not self._capture.allow_unprobed:
            raise UnsoundEngineError(
                f"target {self._target.name}: what the engine captures cannot be compared with the target's own "
                f"weights: {reason}. To use it without this comparison, set capture.allow_unprobed: true; the check "
                "of the features then reports it"
            )
        report = ProbeReport({}, {}, self._config.names, reason)
        log.warning("probe: %s", report.describe())
        return report

    def _read_reference(self) -> _Reference:
        target = StreamedTarget(self._target)
        sizes = [nbytes / _GB for nbytes in target.list_layer_bytes()]
        budget = self._capture.probe_gb
        layers = max(count for count in range(len(sizes) + 1) if sum(sizes[:count]) <= budget)
        reason = (
            f"capture.probe_gb = {budget:g} reaches {layers} of {len(sizes)} layers, which take {sum(sizes):.3g} GB"
        )
        compared = tuple(tap.name for tap in self._taps if tap.hf_index <= layers)
        if layers == len(sizes):
            compared += ("last",)
        if not compared:
            return _Reference({}, (), reason)
        if layers < len(sizes):
            layers = min(layers, max(tap.hf_index for tap in self._taps if tap.hf_index <= layers) + 1)
        log.info(
            "probe: comparing %s of %d prompts with the target's own weights: reads %.3g GB of them (capture.probe_gb "
            "= %g)",
            *(", ".join(compared), len(self._prompts), sum(sizes[:layers]), budget),
        )
        dtype = getattr(torch, self._capture.compute_dtype)
        return _Reference(build_known_streams(target.run(self._prompts, layers, dtype), dtype), compared, reason)

    def _compare_streams(self, engine: TargetEngine, reference: _Reference) -> list[StreamFinding]:
        problem = (
            f"target {self._target.name}: {engine.display_name} does not capture the hidden states that the weights in "
            f"{self._target.model} give"
        )
        try:
            captured = engine.capture(self._prompts, self._taps)
            for prompt, streams in zip(self._prompts, captured, strict=True):
                verify_capture(self._config, "of the probe", streams, len(prompt))
        except CaptureError as error:
            raise UnsoundEngineError(f"{problem}: {error}") from error
        findings = [
            compare_stream(name, [streams[name] for streams in captured], reference.known)
            for name in reference.compared
        ]
        wrong = [f"  {finding.describe()}" for finding in findings if not finding.sound]
        if wrong:
            advice = (
                "Its weights, layers or numerics differ from the registry's: start it with what the registry names, "
                "or correct the registry"
            )
            raise UnsoundEngineError("\n".join([f"{problem}:", *wrong, advice]))
        return findings


def choose_probe_prompts(tokens: Sequence[TokenRow]) -> list[list[int]]:
    """Return a few short prompts: the beginning of the longest sample, and the ends of others.

    Samples begin alike, so more beginnings would add little.
    """
    longest = sorted(range(len(tokens)), key=lambda index: (-len(tokens[index]), index))
    chosen = [tokens[index].input_ids.tolist() for index in longest[:: -(-len(longest) // len(PROMPT_TOKENS))]]
    return [
        row[:length] if number == 0 else row[-length:]
        for number, (row, length) in enumerate(zip(chosen, PROMPT_TOKENS, strict=False))
    ]


def _measure_excess(finding: StreamFinding) -> float:
    return finding.difference / finding.allowed
