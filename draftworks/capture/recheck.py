"""Comparison of the stored features of a few samples with a fresh capture by the same engine.

Feature keys contain the engine's numerics revision, not package versions, so a new version of torch or transformers
changes no key. This check shows whether it changed the numbers; then the revision has to be raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftworks.capture.engine import TargetEngine
from draftworks.capture.verify import HEAD_TOLERANCE
from draftworks.data.token_rows import TokenRow
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.scaled_fp8 import STORED, decode_features
from draftworks.storage.identity import LayerTap

STORED_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2, "float8_e4m3fn": 0.08}
"""Largest difference between a stored and a re-captured stream, as a share of the stream's largest value.

That of scaled e4m3 is half a unit in the last of three places, 1/17 of the largest value, and bfloat16's on top."""
FP8_HEAD_TOLERANCE = 0.2
"""Of logits computed from a `last` in e4m3, as a share of the largest logit."""


@dataclass(frozen=True)
class Recheck:
    """Result of comparing the re-captured samples; differences are shares of the largest absolute value."""

    samples: int
    tokens: int
    rows_equal_tokens: bool
    finite: bool
    feature_difference: float
    head_difference: float
    features_as_captured: bool
    head_equals_logits: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def recheck(
    engine: TargetEngine, store: FeatureStore, refs: Sequence[SampleRef], tokens: Sequence[TokenRow], count: int = 4
) -> Recheck:
    """Compare `count` samples, spread over the set, with a fresh capture and with the target's own logits.

    Raises:
        StoreError: a sample in the store does not match its reference.
    """
    chosen = refs[:: -(-len(refs) // count)]
    sequences = [tokens[ref.metadata["row"]].input_ids.tolist() for ref in chosen]
    pairs = [_Pair.of(engine, store, ref, ids) for ref, ids in zip(chosen, sequences, strict=True)]
    dtypes = {name: spec.dtype for name, spec in chosen[0].feature_specs.items()}
    head_difference = max(pair.head_difference for pair in pairs)
    return Recheck(
        samples=len(pairs),
        tokens=sum(map(len, sequences)),
        rows_equal_tokens=all(pair.rows_equal_tokens for pair in pairs),
        finite=all(pair.finite for pair in pairs),
        feature_difference=max(max(pair.feature_differences.values()) for pair in pairs),
        head_difference=head_difference,
        features_as_captured=all(
            difference <= STORED_TOLERANCE[dtypes[name]]
            for pair in pairs
            for name, difference in pair.feature_differences.items()
        ),
        head_equals_logits=head_difference <= _choose_head_tolerance(dtypes["last"]),
    )


def _choose_head_tolerance(dtype: str) -> float:
    """Return the largest difference of logits for a `last` that is stored in a dtype."""
    if dtype == STORED:
        return FP8_HEAD_TOLERANCE
    return max(STORED_TOLERANCE[dtype], HEAD_TOLERANCE[getattr(torch, dtype)])


@dataclass(frozen=True)
class _Pair:
    """Comparison of the stored and the fresh features of one sample; `feature_differences` by stream name."""

    rows_equal_tokens: bool
    finite: bool
    feature_differences: dict[str, float]
    head_difference: float

    @classmethod
    def of(cls, engine: TargetEngine, store: FeatureStore, ref: SampleRef, ids: list[int]) -> _Pair:
        found, handle = store.get(ref)
        stored = decode_features(found, f"sample {ref.sample_id}")
        names = [name for name in ref.feature_keys if name != "last"]
        taps = [LayerTap(int(name.removeprefix("hf"))) for name in names]
        fresh = engine.capture([ids], taps)[0]  # by stream name, (S, H) each
        lengths_equal = all(len(stream) == len(ids) for stream in stored.values())
        pair = cls(
            rows_equal_tokens=lengths_equal,
            finite=all(bool(torch.isfinite(stream).all()) for stream in stored.values()),
            feature_differences={
                name: _measure_difference(fresh[name], stored[name]) if lengths_equal else 1.0 for name in stored
            },
            head_difference=_measure_head_difference(engine, ids, stored["last"]) if lengths_equal else 1.0,
        )
        store.release(handle)
        return pair


def _measure_head_difference(engine: TargetEngine, ids: list[int], last: Tensor) -> float:
    expected = engine.logits([ids])[0]  # (R, V), the last R positions
    return _measure_difference(expected, engine.head_logits(last[-len(expected) :]))


def _measure_difference(expected: Tensor, found: Tensor) -> float:
    scale = max(float(expected.double().abs().max()), 1e-12)
    return float((expected.double() - found.double()).abs().max()) / scale
