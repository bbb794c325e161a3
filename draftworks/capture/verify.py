"""Checks of captured streams: shape, dtype, finite values, agreement of `last` with the target's logits, and again later."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftworks.capture.background import await_result
from draftworks.capture.capture_plan import SampleJob, StreamPlan
from draftworks.capture.engine import TargetEngine
from draftworks.config.run_files import CaptureRun
from draftworks.data.rejected import RejectedSample
from draftworks.data.tokenized import TokenRow
from draftworks.errors import CaptureError, UnsoundEngineError
from draftworks.features.contracts import CaptureConfig, FeatureStore, SampleRef
from draftworks.features.tensor_bytes import STORED, decode_features
from draftworks.storage.identity import LayerTap

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


VERIFIED_SAMPLES = 4
VERIFIED_TOKENS = 256
"""The head is checked on this many tokens of each first sample, so that logits over a large vocabulary stay small."""

Rows = Mapping[int, TokenRow] | Sequence[TokenRow]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedSample:
    """A sample with its token ids and its features, in the compute dtype: `streams` by name, (S, H) each."""

    job: SampleJob
    input_ids: list[int]
    streams: dict[str, Tensor]

    def encode_missing(self, plan: StreamPlan) -> dict[str, Tensor]:
        """Return the streams that the job asks to store, as the store keeps them."""
        return plan.encode({name: self.streams[name] for name in self.job.missing})


class SoundCapture:
    """Runs batches through an engine and checks what comes back; samples that fail are kept with their reasons.

    Args:
        tokens: the tokenized set, or rows by number; jobs name its rows.
        samples: number of samples of which `capture.max_failed_share` is the share.
    """

    def __init__(self, run: CaptureRun, streams: StreamPlan, tokens: Rows, samples: int) -> None:
        self._failures: dict[str, RejectedSample] = {}
        self._run = run
        self._streams = streams
        self._tokens = tokens
        self._samples = samples

    @property
    def failed(self) -> list[RejectedSample]:
        """The samples whose last capture failed, in the order in which they failed first."""
        return list(self._failures.values())

    def submit(self, engine: TargetEngine, batch: Sequence[SampleJob]) -> Future[list[dict[str, Tensor]]]:
        """Ask an engine for the missing streams of a batch; `collect` checks what comes."""
        return engine.submit(self._list_sequences(batch), self._select_taps(batch))

    def capture(self, engine: TargetEngine, batch: Sequence[SampleJob]) -> list[CapturedSample]:
        """Submit a batch and collect it."""
        answer = self.submit(engine, batch)
        try:
            return self.collect(engine, batch, answer)
        except BaseException:
            engine.cancel([answer])
            raise

    def collect(
        self, engine: TargetEngine, batch: Sequence[SampleJob], answer: Future[list[dict[str, Tensor]]]
    ) -> list[CapturedSample]:
        """Return the samples of a submitted batch whose features are valid; record the others as failed.

        An engine's error does not say which sample caused it, so each half of the batch is then tried by itself.

        Raises:
            CaptureError: more samples failed than `capture.max_failed_share` allows.
            UnsoundEngineError: the engine's streams are not those that were asked for.
        """
        compute_dtype = self._run.capture.compute_dtype
        taps = tuple(tap.hf_index for tap in self._select_taps(batch))
        config = CaptureConfig(taps, self._streams.hidden_size, compute_dtype)
        try:
            found = await_result(answer)
        except CaptureError as error:
            if len(batch) > 1:
                halves = (batch[: len(batch) // 2], batch[len(batch) // 2 :])
                parts = [part for part in halves if any(job.missing for job in part)]
                return [each for part in parts for each in self.capture(engine, part)]
            self._note_failure(batch[0], CaptureError(f"sample {batch[0].sample_id}: {error}"))
            return []
        valid = []
        for job, input_ids, streams in zip(batch, self._list_sequences(batch), found, strict=True):
            if not job.missing:
                continue  # its features are stored already
            try:
                verify_capture(config, job.sample_id, streams, job.num_tokens)
            except CaptureError as error:
                self._note_failure(job, error)
            else:
                self._failures.pop(job.sample_id, None)
                valid.append(CapturedSample(job, input_ids, streams))
        return valid

    def _list_sequences(self, batch: Sequence[SampleJob]) -> list[list[int]]:
        return [self._tokens[job.row].input_ids.tolist() for job in batch]

    def _select_taps(self, batch: Sequence[SampleJob]) -> list[LayerTap]:
        missing = {name for job in batch for name in job.missing}
        return [tap for tap in self._streams.taps if tap.name in missing]

    def _note_failure(self, job: SampleJob, error: CaptureError) -> None:
        """Record a failed sample.

        Raises:
            CaptureError: more samples failed than `capture.max_failed_share` allows; `error` itself if it is the first.
        """
        self._failures[job.sample_id] = RejectedSample(job.sample_id, str(error))
        log.warning("%s", error)
        if len(self._failures) > self._run.capture.max_failed_share * self._samples:
            if len(self._failures) == 1:
                raise error
            raise _make_too_many_error(
                self._run.target.name, self._run.capture.max_failed_share, self.failed, self._samples
            ) from error


def verify_head_of(engine: TargetEngine, captured: Sequence[CapturedSample]) -> None:
    """Check the target's head on `last` of the first few captured samples, see `check_head`."""
    chosen = captured[:VERIFIED_SAMPLES]
    prefixes = [each.input_ids[:VERIFIED_TOKENS] for each in chosen]
    last = [each.streams["last"][:VERIFIED_TOKENS] for each in chosen]
    check_head(engine, [each.job.sample_id for each in chosen], prefixes, last)


def require_few_failed(
    target: str, max_share: float, failed: Sequence[RejectedSample], samples: int, without: int = 0
) -> None:
    """Raise CaptureError if more of `samples` samples failed than the share `max_share`, or all of them.

    Args:
        without: number of samples that failed before and are not in `failed`.
    """
    count = len(failed) + without
    if count > max_share * samples or count == samples:
        raise _make_too_many_error(target, max_share, failed, samples, without)


def _make_too_many_error(
    target: str, max_share: float, failed: Sequence[RejectedSample], samples: int, without: int = 0
) -> CaptureError:
    return CaptureError(
        f"target {target}: {len(failed) + without} of {samples} samples have no valid features, more than "
        f"capture.max_failed_share = {max_share:g} allows. The first: {failed[0].reason}. "
        "What was captured is kept."
    )
