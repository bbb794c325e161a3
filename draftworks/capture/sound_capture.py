"""Capture of batches of samples; only samples whose features pass all checks are returned."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from draftworks.capture.background import await_result
from draftworks.capture.engine import TargetEngine
from draftworks.capture.plan import SampleJob, StreamPlan
from draftworks.capture.verify import check_head, verify_capture
from draftworks.config.run_files import CaptureRun
from draftworks.data.rejected import RejectedSample
from draftworks.data.token_rows import TokenRow
from draftworks.errors import CaptureError
from draftworks.features.contracts import CaptureConfig
from draftworks.storage.identity import LayerTap

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
