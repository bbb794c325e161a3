"""Plan of a capture, made before a target is loaded: feature keys, missing features, bytes and batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftworks.capture.engine import find_backend, make_engine_identity
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenRow
from draftworks.errors import CaptureError
from draftworks.features.contracts import FeatureSpec, KeyedFeatureStore, SampleRef
from draftworks.features.manifest import FeatureSetIdentity
from draftworks.features.tensor_bytes import SCALE_BYTES, STORED, encode_stream
from draftworks.storage.identity import FeatureIdentity, LayerTap, Stream, digest

GB = 1e9


@dataclass(frozen=True)
class StreamPlan:
    """Streams of a run, and the identity from which their feature keys and specs are made."""

    streams: tuple[Stream, ...]
    identity: FeatureIdentity
    hidden_size: int

    @classmethod
    def of(cls, run: CaptureRun) -> StreamPlan:
        """Return the streams that `run` captures; raise CaptureError if a tap is outside the target."""
        outside = [k for k in run.taps if not 0 <= k < run.target.num_layers]
        if outside:
            raise CaptureError(
                f"target {run.target.name}: layer taps {outside} are outside it, "
                f"expected 0..{run.target.num_layers - 1} (`last` is always captured)"
            )
        last = find_backend(run.capture.backend).last_hidden
        taps = tuple(LayerTap(k) for k in sorted(set(run.taps)))
        capture = run.capture
        identity = FeatureIdentity(run.target.digest, make_engine_identity(capture), capture.dtype, capture.storage)
        return cls((*taps, last), identity, run.target.hidden_size)

    @property
    def taps(self) -> tuple[LayerTap, ...]:
        return tuple(stream for stream in self.streams if isinstance(stream, LayerTap))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stream.name for stream in self.streams)

    def make_keys(self, token_digest: str) -> dict[str, str]:
        """Return the feature keys by stream name: functions of the sample's tokens, not of its batch or its id."""
        return {stream.name: self.identity.key(token_digest, stream) for stream in self.streams}

    def make_specs(self, num_tokens: int) -> dict[str, FeatureSpec]:
        """Return the specs of a sample's features as they are stored, by stream name."""
        return {
            stream.name: FeatureSpec(
                stream.name,
                self._make_shape(stream, num_tokens),
                self.identity.get_stored_dtype(stream),
                target_repr=None if isinstance(stream, LayerTap) else "hidden_state",
                target_meta={} if isinstance(stream, LayerTap) else {"normed": stream.normed},
            )
            for stream in self.streams
        }

    def encode(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return streams (S, H) by name as they are stored, see `scaled_fp8`."""
        by_name = {stream.name: stream for stream in self.streams}
        dtypes = {name: self.identity.get_stored_dtype(by_name[name]) for name in streams}
        return {
            name: encode_stream(tensor) if dtypes[name] == STORED else tensor.to(getattr(torch, dtypes[name]))
            for name, tensor in streams.items()
        }

    def _make_shape(self, stream: Stream, num_tokens: int) -> tuple[int, int]:
        encoded = self.identity.get_stored_dtype(stream) == STORED
        return num_tokens, self.hidden_size + (SCALE_BYTES if encoded else 0)


@dataclass(frozen=True)
class SampleJob:
    """A sample and its missing features.

    Attributes:
        row: index of the sample in the tokenized set.
        keys: feature keys of all its streams, by stream name.
        missing: names of the streams to be stored.
    """

    row: int
    sample_id: str
    num_tokens: int
    keys: dict[str, str]
    missing: tuple[str, ...]

    def choose_rank(self, world: int) -> int:
        """Return the rank that captures it. It depends on content only, so ranks agree whatever the store holds."""
        return int(next(iter(self.keys.values())), 16) % world

    def make_ref(self, store_uri: str) -> SampleRef:
        """Return the reference under which the missing streams are put into a store."""
        keys = {name: self.keys[name] for name in self.missing}
        return SampleRef(self.sample_id, "", self.sample_id, store_uri, keys, {})


@dataclass(frozen=True)
class CapturePlan:
    """All missing features, over all ranks.

    Attributes:
        samples: number of samples of the set.
        jobs: the samples with missing features.
        nbytes: number of bytes that storing the missing features takes.
    """

    streams: StreamPlan
    samples: int
    jobs: tuple[SampleJob, ...]
    nbytes: int

    def select_share(self, rank: int, world: int) -> list[SampleJob]:
        return [job for job in self.jobs if job.choose_rank(world) == rank]

    def count_bytes(self, job: SampleJob) -> int:
        """Return the number of bytes that storing a sample's missing streams takes."""
        specs = self.streams.make_specs(job.num_tokens)
        return sum(specs[name].nbytes for name in job.missing)

    def describe(self) -> str:
        tokens = sum(job.num_tokens for job in self.jobs)
        return (
            f"capture: {len(self.jobs)} of {self.samples} samples lack features ({tokens:,} tokens); "
            f"storing them takes {self.nbytes / GB:.3f} GB"
        )


def plan_capture(run: CaptureRun, tokens: Sequence[TokenRow], store: KeyedFeatureStore) -> CapturePlan:
    """Plan the capture of all features that the store lacks. Samples with the same tokens are captured once.

    Raises:
        CaptureError: a sample is empty, longer than the target's context or has ids outside its vocabulary; a tap is
            outside the target.
        StoreError: shards of the store are damaged.
    """
    streams = StreamPlan.of(run)
    for row in tokens:
        _check_sample(row, run)
    keys_of_rows = [streams.make_keys(row.token_digest) for row in tokens]
    lacking = set(store.find_missing(key for keys in keys_of_rows for key in keys.values()))
    jobs, nbytes = [], 0
    for index, (row, keys) in enumerate(zip(tokens, keys_of_rows, strict=True)):
        missing = tuple(name for name, key in keys.items() if key in lacking)
        if missing:
            lacking.difference_update(keys[name] for name in missing)
            specs = streams.make_specs(len(row.input_ids))
            nbytes += sum(specs[name].nbytes for name in missing)
            jobs.append(SampleJob(index, row.sample_id, len(row.input_ids), keys, missing))
    return CapturePlan(streams, len(tokens), tuple(jobs), nbytes)


def make_refs(run: CaptureRun, streams: StreamPlan, tokens: Sequence[TokenRow], store_uri: str) -> list[SampleRef]:
    """Return the references of all samples of a set; they are known before anything is captured.

    A reference's metadata names the tokens of its features: the sample's `row` in the set, and their digest `tokens`.
    """
    run_id = digest(make_set_identity(run, streams).to_json())
    return [_make_ref(run, streams, row, index, run_id, store_uri) for index, row in enumerate(tokens)]


def make_set_identity(run: CaptureRun, streams: StreamPlan) -> FeatureSetIdentity:
    """Return the properties that all features of a set share."""
    last = streams.streams[-1]
    assert not isinstance(last, LayerTap), "`last` is the last stream of a plan"
    return FeatureSetIdentity(
        target=run.target.digest,
        engine=streams.identity.engine.name,
        numerics=streams.identity.engine.numerics,
        dtype=streams.identity.dtype,
        last_normed=last.normed,
        storage=None if streams.identity.storage == "plain" else streams.identity.storage,
    )


def require_budget(plan: CapturePlan, run: CaptureRun) -> None:
    """Raise CaptureError if the missing features need more bytes than the configured budget or the free disk space."""
    budget = run.capture.budget_gb * GB
    if plan.nbytes > budget:
        raise CaptureError(
            f"target {run.target.name}: capturing {run.tokens} would store {plan.nbytes / GB:.3f} GB, more than "
            f"capture.budget_gb = {run.capture.budget_gb:g}. Raise the budget, or use fewer samples "
            "(data.max_conversations), shorter ones (max_length) or fewer taps. Nothing was stored."
        )
    if run.store.kind == "s3":
        return
    free = shutil.disk_usage(_find_existing(run.store.root)).free
    if plan.nbytes > free:
        raise CaptureError(
            f"target {run.target.name}: capturing {run.tokens} would store {plan.nbytes / GB:.3f} GB, but the disk of "
            f"{run.store.root} has {free / GB:.3f} GB left. Nothing was stored."
        )


def make_batches(jobs: Sequence[SampleJob], batch_tokens: int) -> Iterator[list[SampleJob]]:
    """Yield batches of jobs of similar length, longest first: at most `batch_tokens` with padding, or one sample."""
    batch: list[SampleJob] = []
    for job in sorted(jobs, key=lambda each: (-each.num_tokens, each.row)):
        if batch and batch[0].num_tokens * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def make_windows(
    batches: Iterable[Sequence[SampleJob]], count_bytes: Callable[[SampleJob], int], nbytes: int
) -> Iterator[list[Sequence[SampleJob]]]:
    """Yield windows of consecutive batches that together have at most `nbytes`, or of a single batch."""
    window: list[Sequence[SampleJob]] = []
    size = 0
    for batch in batches:
        more = sum(count_bytes(job) for job in batch)
        if window and size + more > nbytes:
            yield window
            window, size = [], 0
        window.append(batch)
        size += more
    if window:
        yield window


def _make_ref(
    run: CaptureRun, streams: StreamPlan, row: TokenRow, index: int, run_id: str, store_uri: str
) -> SampleRef:
    specs = streams.make_specs(len(row.input_ids))
    return SampleRef(
        sample_id=row.sample_id,
        run_id=run_id,
        source_task_id=row.sample_id,
        feature_store_uri=store_uri,
        feature_keys=streams.make_keys(row.token_digest),
        feature_specs=specs,
        target_model_version=run.target.digest,
        tokenizer_version=run.target.tokenizer_digest,
        num_tokens=len(row.input_ids),
        estimated_bytes=sum(spec.nbytes for spec in specs.values()),
        metadata={"row": index, "tokens": row.token_digest},
    )


def _check_sample(row: TokenRow, run: CaptureRun) -> None:
    count = len(row.input_ids)
    where = f"target {run.target.name}, sample {row.sample_id}"
    if not 0 < count <= run.target.context:
        raise CaptureError(
            f"{where}: {count} tokens, expected 1 to {run.target.context} (the model's context). "
            "Lower max_length of the target, so that longer samples are cut or rejected when they are tokenized."
        )
    low, high = int(row.input_ids.min()), int(row.input_ids.max())
    if low < 0 or high >= run.target.vocab_size:
        raise CaptureError(
            f"{where}: token ids {low}..{high}, expected 0..{run.target.vocab_size - 1}. "
            "The set was tokenized for another model: tokenize it with this target's tokenizer."
        )


def _find_existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path
