"""Capturing the features of a tokenized set: only what is missing, resumable, verified.

With several ranks, each calls `capture_missing`; after a barrier, one calls `write_manifest`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.capture.engine import TargetEngine
from draftworks.capture.plan import (
    GB,
    CapturePlan,
    SampleJob,
    StreamPlan,
    batches,
    plan_capture,
    require_budget,
)
from draftworks.capture.progress import Progress, ProgressCallback
from draftworks.capture.verify import check_head, check_sample
from draftworks.data.token_rows import TokenRow
from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import FeatureSetManifest, write_feature_set
from draftworks.identity import digest
from draftworks.runs import CaptureRun

VERIFIED_SAMPLES = 4
VERIFIED_TOKENS = 256
"""The head is checked on the beginnings of the first samples: their logits over a large vocabulary stay small."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureSummary:
    """What a rank did. `samples` is the size of the set, `captured` how many this rank ran through the target."""

    samples: int
    captured: int
    tokens: int
    features: int
    nbytes: int
    seconds: float


EngineFactory = Callable[[], TargetEngine]


def capture_features(
    run: CaptureRun,
    engine: EngineFactory,
    tokens: Sequence[TokenRow],
    progress: ProgressCallback | None = None,
) -> CaptureSummary:
    """Capture what is missing and write the feature set, in one process. See `capture_missing`."""
    summary = capture_missing(run, engine, tokens, progress=progress)
    write_manifest(run, tokens)
    return summary


def capture_missing(
    run: CaptureRun,
    engine: EngineFactory,
    tokens: Sequence[TokenRow],
    rank: int = 0,
    world: int = 1,
    progress: ProgressCallback | None = None,
) -> CaptureSummary:
    """Capture this rank's share of the features that the store lacks.

    Killed at any moment, it leaves a store that is sound; called again, it goes on from the last published shard.

    Args:
        engine: called once, and only if this rank has anything to capture.
        progress: called after every batch.

    Raises:
        CaptureError: see `plan_capture`, `require_budget`, and draftworks.capture.verify.
    """
    store = LocalFeatureStore(run.store, shard_bytes=run.capture.shard_mb << 20)
    store.gc()
    plan = plan_capture(run, tokens, store)
    log.info(plan.describe())
    require_budget(plan, run)
    session = _Session(run, plan, store, tokens, plan.share(rank, world), progress)
    try:
        return session.run(engine)
    finally:
        store.close()


def write_manifest(run: CaptureRun, tokens: Sequence[TokenRow]) -> FeatureSetManifest:
    """Write refs.jsonl and manifest.json into `run.out`, once every rank has captured its share.

    A reference's metadata says which tokens its features are of: the sample's `row` in the set, their digest `tokens`.

    Raises:
        StoreError: features are missing: a rank did not finish.
    """
    store = LocalFeatureStore(run.store)
    streams = StreamPlan.of(run)
    refs = [_ref(run, streams, store, row, index) for index, row in enumerate(tokens)]
    lacking = [ref.sample_id for ref in refs if store.missing(ref.feature_keys.values())]
    if lacking:
        raise StoreError(
            f"{len(lacking)} of {len(refs)} samples lack features in {run.store}, the first {lacking[0]}: "
            "capture again, only what is missing will be captured"
        )
    return write_feature_set(run.out, refs, _identity(run, streams), streams.names, store.uri)


class _Session:
    """One rank's pass over its jobs."""

    def __init__(
        self,
        run: CaptureRun,
        plan: CapturePlan,
        store: LocalFeatureStore,
        tokens: Sequence[TokenRow],
        jobs: Sequence[SampleJob],
        progress: ProgressCallback | None,
    ) -> None:
        self._run = run
        self._plan = plan
        self._store = store
        self._tokens = tokens
        self._jobs = jobs
        self._progress = progress
        self._dtype = getattr(torch, run.capture.dtype)
        self._features = 0
        self._nbytes = 0
        self._done = 0
        self._tokens_done = 0

    def run(self, factory: EngineFactory) -> CaptureSummary:
        started = time.monotonic()
        total = sum(job.num_tokens for job in self._jobs)
        engine = factory() if self._jobs else None
        loaded = time.monotonic()
        for number, batch in enumerate(batches(self._jobs, self._run.capture.batch_tokens)):
            self._capture(engine, batch, verify_head=number == 0)
            self._done += len(batch)
            self._tokens_done += sum(job.num_tokens for job in batch)
            if self._progress is not None:
                seconds = time.monotonic() - loaded
                share = self._tokens_done / total
                self._progress(Progress("samples", self._done, len(self._jobs), share, self._tokens_done, seconds))
        self._store.flush()
        seconds = time.monotonic() - started
        log.info(f"captured {self._done} samples, {self._nbytes / GB:.3f} GB in {seconds:.1f} s")
        return CaptureSummary(self._plan.samples, self._done, total, self._features, self._nbytes, seconds)

    def _capture(self, engine: TargetEngine, batch: Sequence[SampleJob], verify_head: bool) -> None:
        rows = [self._tokens[job.row].input_ids.tolist() for job in batch]
        missing = {name for job in batch for name in job.missing}
        captured = engine.capture(rows, [tap for tap in self._plan.streams.taps if tap.name in missing])
        for job, streams in zip(batch, captured, strict=True):
            check_sample(job.sample_id, streams, job.num_tokens, self._plan.streams.hidden_size)
        if verify_head:
            self._verify_head(engine, batch[:VERIFIED_SAMPLES], rows, captured)
        for job, streams in zip(batch, captured, strict=True):
            self._put(job, {name: streams[name].to(self._dtype) for name in job.missing})

    def _verify_head(
        self,
        engine: TargetEngine,
        jobs: Sequence[SampleJob],
        rows: Sequence[Sequence[int]],
        captured: Sequence[dict[str, Tensor]],
    ) -> None:
        count = len(jobs)
        beginnings = [row[:VERIFIED_TOKENS] for row in rows[:count]]
        last = [streams["last"][:VERIFIED_TOKENS] for streams in captured[:count]]
        check_head(engine, [job.sample_id for job in jobs], beginnings, last)

    def _put(self, job: SampleJob, tensors: dict[str, Tensor]) -> None:
        ref = SampleRef(
            sample_id=job.sample_id,
            run_id="",
            source_task_id=job.sample_id,
            feature_store_uri=self._store.uri,
            feature_keys={name: job.keys[name] for name in job.missing},
            feature_specs={},
        )
        self._store.put(ref, tensors)
        self._features += len(tensors)
        self._nbytes += sum(tensor.nbytes for tensor in tensors.values())


def _ref(run: CaptureRun, streams: StreamPlan, store: LocalFeatureStore, row: TokenRow, index: int) -> SampleRef:
    specs = streams.specs(len(row.input_ids))
    return SampleRef(
        sample_id=row.sample_id,
        run_id=digest(_identity(run, streams)),
        source_task_id=row.sample_id,
        feature_store_uri=store.uri,
        feature_keys=streams.keys(row.token_digest),
        feature_specs=specs,
        target_model_version=run.target.digest,
        tokenizer_version=run.target.tokenizer_digest,
        num_tokens=len(row.input_ids),
        estimated_bytes=sum(spec.nbytes for spec in specs.values()),
        metadata={"row": index, "tokens": row.token_digest},
    )


def _identity(run: CaptureRun, streams: StreamPlan) -> dict[str, str | int | bool]:
    last = streams.streams[-1]
    return {
        "target": run.target.digest,
        "engine": streams.identity.engine.name,
        "numerics": streams.identity.engine.numerics,
        "dtype": streams.identity.dtype,
        "last_normed": last.normed,
    }
