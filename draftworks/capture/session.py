"""Capture of the features of a tokenized set: resumable, verified, and only of features that are missing.

With several ranks, each calls `capture_missing`; after a barrier, one calls `write_manifest`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from draftworks.capture.batch_notes import Progress, ProgressCallback, Windows, cut_windows, remove_note
from draftworks.capture.capture_plan import (
    GB,
    CapturePlan,
    SampleJob,
    StreamPlan,
    make_refs,
    make_set_identity,
    plan_capture,
    require_budget,
)
from draftworks.capture.claims import Claims, Share, share_out
from draftworks.capture.engine import TargetEngine, find_backend
from draftworks.capture.verify import SoundCapture, require_few_failed, verify_head_of
from draftworks.config.capture import CaptureSpec
from draftworks.config.run_files import CaptureRun
from draftworks.data.conversations import QUARANTINE_FILE
from draftworks.data.rejected import RejectedSample, write_rejected
from draftworks.data.tokenized import TokenRow
from draftworks.errors import EngineError, StoreError
from draftworks.features.contracts import KeyedFeatureStore, SampleRef
from draftworks.features.manifest import FeatureSetManifest, write_feature_set
from draftworks.features.open_store import open_store, open_store_to_write
from draftworks.storage.words import format_count

DEFAULT_BATCHES = 4
"""Batches in flight where `capture.in_flight_tokens` is not set."""

Work = TypeVar("Work")


@dataclass(frozen=True)
class RequestSize:
    """Tokens of a batch, and the bytes of its hidden states."""

    tokens: int
    nbytes: int

    @classmethod
    def of(cls, tokens: int, streams: StreamPlan, capture: CaptureSpec) -> RequestSize:
        itemsize = getattr(torch, capture.compute_dtype).itemsize
        return cls(tokens, tokens * len(streams.streams) * streams.hidden_size * itemsize)


@dataclass(frozen=True)
class InFlightBudget:
    """The most that is in flight, but for one batch, which is always allowed. `batches` None is no limit."""

    tokens: int
    nbytes: int
    batches: int | None = None

    @classmethod
    def of(cls, capture: CaptureSpec, engine: TargetEngine) -> InFlightBudget:
        """Return the budget of the settings, further limited by what the engine can take."""
        tokens = capture.in_flight_tokens or DEFAULT_BATCHES * capture.batch_tokens
        nbytes = capture.in_flight_mb << 20
        room = engine.bytes_in_flight_limit
        return cls(tokens, nbytes if room is None else min(nbytes, room), engine.batches_in_flight_limit)


class InFlight(Generic[Work]):
    """A queue of work in flight, oldest first. Each counts until it is dropped, thus until its features are stored."""

    def __init__(self, budget: InFlightBudget) -> None:
        self._budget = budget
        self._entries: deque[tuple[Work, RequestSize]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def limit(self, budget: InFlightBudget) -> None:
        """Set the budget, once the engine is known."""
        self._budget = budget

    def fits(self, size: RequestSize) -> bool:
        """Return whether work of this size may begin now."""
        budget, sizes = self._budget, [each for _, each in self._entries]
        return not sizes or (
            sum(each.tokens for each in sizes) + size.tokens <= budget.tokens
            and sum(each.nbytes for each in sizes) + size.nbytes <= budget.nbytes
            and (budget.batches is None or len(sizes) < budget.batches)
        )

    def add(self, work: Work, size: RequestSize) -> None:
        self._entries.append((work, size))

    @property
    def oldest(self) -> Work:
        return self._entries[0][0]

    def drop_oldest(self) -> None:
        self._entries.popleft()

    def list_work(self) -> list[Work]:
        return [work for work, _ in self._entries]


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureSummary:
    """Result of one rank's capture.

    Attributes:
        samples: number of samples of the set.
        captured: number of samples that this rank ran through the target and stored.
        failed: samples for which the target gave no valid features, with the reasons.
    """

    samples: int
    captured: int
    tokens: int
    features: int
    nbytes: int
    seconds: float
    failed: tuple[RejectedSample, ...] = ()


EngineFactory = Callable[[], TargetEngine]
Confirmation = Callable[[TargetEngine], None]
"""Raises UnsoundEngineError if an engine is no longer what it was when the capture began."""


def capture_features(
    run: CaptureRun,
    engine_factory: EngineFactory,
    tokens: Sequence[TokenRow],
    progress: ProgressCallback | None = None,
) -> CaptureSummary:
    """Capture the missing features and write the feature set, in one process. See `capture_missing`."""
    summary = capture_missing(run, engine_factory, tokens, progress=progress)
    write_manifest(run, tokens, summary.failed)
    return summary


def capture_missing(
    run: CaptureRun,
    engine_factory: EngineFactory,
    tokens: Sequence[TokenRow],
    rank: int = 0,
    world: int = 1,
    progress: ProgressCallback | None = None,
    confirm: Confirmation | None = None,
) -> CaptureSummary:
    """Capture this rank's share of the features that the store lacks.

    A capture that is killed at any moment leaves a sound store; the next call goes on from the last published shard.

    Args:
        engine_factory: loads the engine; called once, and only if this rank has anything to capture.
        progress: called after every batch.
        confirm: check of an engine that another party can change; features are stored only after a check that follows
            their capture.

    Raises:
        CaptureError: see `plan_capture`, `require_budget`, and draftworks.capture.verify; errors of single samples are
            raised only if these are more than `capture.max_failed_share` of the set.
        EngineError: the engine cannot go on. Features that are already stored are kept.
    """
    store = open_store_to_write(run.store, shard_bytes=run.capture.shard_mb << 20)
    store.gc()
    plan = plan_capture(run, tokens, store)
    log.info(plan.describe())
    require_budget(plan, run)
    session = _Session(run, plan, store, tokens, cut_windows(run, plan, tokens, rank, world), progress, confirm)
    try:
        return session.run(engine_factory)
    finally:
        store.close()


def write_manifest(
    run: CaptureRun, tokens: Sequence[TokenRow], failed: Sequence[RejectedSample] = ()
) -> FeatureSetManifest:
    """Write refs.jsonl and manifest.json into `run.out`, once every rank has captured its share.

    A reference's metadata names the tokens of its features: the sample's `row` in the set, and their digest `tokens`.
    Samples that failed are left out and written to quarantine.jsonl with their reasons; that file exists only if there
    are any.

    Args:
        failed: failed samples of all ranks.

    Raises:
        CaptureError: more samples failed than `capture.max_failed_share` allows, or all of them.
        StoreError: features of other samples are missing: a rank did not finish.
    """
    store = open_store(run.store)
    streams = StreamPlan.of(run)
    refs = make_refs(run, streams, tokens, store.uri)
    missing = set(store.find_missing(key for ref in refs for key in ref.feature_keys.values()))
    lacking = [ref for ref in refs if not missing.isdisjoint(ref.feature_keys.values())]
    excused = _quarantine(run, refs, failed)
    unexplained = [ref.sample_id for ref in lacking if ref.sample_id not in excused]
    if unexplained:
        raise StoreError(
            f"{len(unexplained)} of {len(refs)} samples lack features in {store.uri}, the first {unexplained[0]}: "
            "capture again, only what is missing will be captured"
        )
    left = [ref for ref in refs if ref.sample_id not in excused]
    manifest = write_feature_set(run.out, left, make_set_identity(run, streams), streams.names, store.uri)
    remove_note(run, tokens)
    return manifest


def _quarantine(run: CaptureRun, refs: Sequence[SampleRef], failed: Sequence[RejectedSample]) -> set[str]:
    """Write quarantine.jsonl and return the ids of failed samples and of samples with the same tokens."""
    if not failed:
        return set()
    reasons = {each.sample_id: each.reason for each in failed}
    reason_of = {ref.metadata["tokens"]: reasons[ref.sample_id] for ref in refs if ref.sample_id in reasons}
    rejected = [
        RejectedSample(ref.sample_id, reason_of[ref.metadata["tokens"]])
        for ref in refs
        if ref.metadata["tokens"] in reason_of
    ]
    write_rejected(run.out / QUARANTINE_FILE, rejected)
    require_few_failed(run.target.name, run.capture.max_failed_share, rejected, len(refs))
    return {each.sample_id for each in rejected}


@dataclass(frozen=True)
class _Submitted:
    """A batch that the engine was asked for, and the share that is finished with it, if any."""

    batch: Sequence[SampleJob]
    answer: Future[list[dict[str, Tensor]]]
    finishes: Share | None


class _Session:
    """One rank's pass over its jobs: batches are stored in their order, while the engine computes later ones."""

    def __init__(
        self,
        run: CaptureRun,
        plan: CapturePlan,
        store: KeyedFeatureStore,
        tokens: Sequence[TokenRow],
        windows: Windows,
        progress: ProgressCallback | None,
        confirm: Confirmation | None,
    ) -> None:
        self._run = run
        self._plan = plan
        self._store = store
        self._windows = windows
        self._jobs = [job for window in windows for batch in window for job in batch if job.missing]
        self._progress = progress
        self._confirm = confirm
        self._held: list[tuple[SampleJob, dict[str, Tensor]]] = []
        self._held_bytes = 0
        self._features = 0
        self._nbytes = 0
        self._done = 0
        self._tokens_done = 0
        self._loaded = 0.0
        self._sound = SoundCapture(run, plan.streams, tokens, plan.samples)

    def run(self, engine_factory: EngineFactory) -> CaptureSummary:
        """Capture this rank's jobs; features that another process is capturing into this store are left to it."""
        started = time.monotonic()
        shares = share_out(
            self._windows,
            self._store,
            Claims(self._run.store.root),
            keep_whole_batches=find_backend(self._run.capture.backend).repeatable,
        )
        engine: TargetEngine | None = None
        in_flight: InFlight[_Submitted] | None = None
        with closing(shares), ExitStack() as stopping:
            for share in shares:
                if share.batches and (engine is None or in_flight is None):
                    engine = engine_factory()
                    in_flight = InFlight(InFlightBudget.of(self._run.capture, engine))
                    stopping.callback(_cancel, engine, in_flight)
                    self._loaded = time.monotonic()
                if engine is None or in_flight is None:
                    continue
                self._begin(engine, in_flight, share)
                if not share.batches:
                    self._finish_all(engine, in_flight)
            if engine is not None and in_flight is not None:
                self._finish_all(engine, in_flight)
        seconds = time.monotonic() - started
        captured = self._done - len(self._sound.failed)
        log.info(f"captured {format_count(captured, 'sample')}, {self._nbytes / GB:.3f} GB in {seconds:.1f} s")
        if self._done < len(self._jobs):
            log.info(f"by another run meanwhile: {format_count(len(self._jobs) - self._done, 'sample')}")
        return CaptureSummary(
            self._plan.samples,
            captured,
            self._tokens_done,
            self._features,
            self._nbytes,
            seconds,
            tuple(self._sound.failed),
        )

    def _begin(self, engine: TargetEngine, in_flight: InFlight[_Submitted], share: Share) -> None:
        """Submit the batches of a share. Batches of before are finished until there is room."""
        for number, batch in enumerate(share.batches, start=1):
            tokens = sum(job.num_tokens for job in batch)
            size = RequestSize.of(tokens, self._plan.streams, self._run.capture)
            while not in_flight.fits(size):
                self._finish_oldest(engine, in_flight)
            answer = self._sound.submit(engine, batch)
            in_flight.add(_Submitted(batch, answer, share if number == len(share.batches) else None), size)
            if self._done == 0:  # alone: nothing more is asked of an engine until its head was verified
                self._finish_oldest(engine, in_flight)

    def _finish_all(self, engine: TargetEngine, in_flight: InFlight[_Submitted]) -> None:
        while in_flight:
            self._finish_oldest(engine, in_flight)

    def _finish_oldest(self, engine: TargetEngine, in_flight: InFlight[_Submitted]) -> None:
        """Check and store the oldest batch in flight; publish the features of a share with its last batch."""
        oldest = in_flight.oldest
        captured = self._sound.collect(engine, oldest.batch, oldest.answer)
        if self._done == 0:
            verify_head_of(engine, captured)
        for each in captured:
            self._hold(each.job, each.encode_missing(self._plan.streams))
        if self._confirm is None or self._held_bytes >= self._run.capture.shard_mb << 20:
            self._store_held(engine)
        self._report(oldest.batch)
        if oldest.finishes is not None:
            self._store_held(engine)
            oldest.finishes.finish()
        in_flight.drop_oldest()

    def _report(self, batch: Sequence[SampleJob]) -> None:
        wanted = [job for job in batch if job.missing]
        self._done += len(wanted)
        self._tokens_done += sum(job.num_tokens for job in wanted)
        if self._progress is not None:
            seconds = time.monotonic() - self._loaded
            share = self._tokens_done / sum(job.num_tokens for job in self._jobs)
            self._progress(Progress("samples", self._done, len(self._jobs), share, self._tokens_done, seconds))

    def _hold(self, job: SampleJob, tensors: dict[str, Tensor]) -> None:
        self._held.append((job, tensors))
        self._held_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _store_held(self, engine: TargetEngine) -> None:
        """Confirm that the engine is unchanged, then store the samples captured since the last call."""
        if self._held and self._confirm is not None:
            try:
                self._confirm(engine)
            except EngineError as error:
                raise type(error)(
                    f"{error}\nThe last {len(self._held)} samples were captured since the engine was last compared with "
                    "the target's weights, and are not stored"
                ) from error
        for job, tensors in self._held:
            self._put(job, tensors)
        self._held, self._held_bytes = [], 0

    def _put(self, job: SampleJob, tensors: dict[str, Tensor]) -> None:
        self._store.put(job.make_ref(self._store.uri), tensors)
        self._features += len(tensors)
        self._nbytes += sum(tensor.nbytes for tensor in tensors.values())


def _cancel(engine: TargetEngine, in_flight: InFlight[_Submitted]) -> None:
    if in_flight:
        engine.cancel([each.answer for each in in_flight.list_work()])
