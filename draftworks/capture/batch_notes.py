"""Batches of a capture, fixed when it begins: the composition of a batch decides the last bits of its features.

The samples that lack features when a capture begins are written to a note beside the store. A capture that resumes
after an interruption, and a job that joins it later, cut the same batches and the same windows of batches from that note, on
any number of ranks. A batch of which some features are stored already is computed whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.capture.capture_plan import CapturePlan, SampleJob, StreamPlan, make_batches, make_windows
from draftworks.capture.engine import find_backend
from draftworks.config.run_files import CaptureRun
from draftworks.data.tokenized import TokenRow
from draftworks.errors import StoreError
from draftworks.storage.files import publish_file, read_json
from draftworks.storage.identity import digest

FOLDER = "begun"
"""Folder of the notes, in the root of the feature store."""
ABANDONED_AFTER_S = 30 * 24 * 3600.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchNote:
    """The samples that lacked features when a capture began.

    Attributes:
        world: number of ranks when the capture began.
        rows: indices of the samples in the tokenized set, ascending; of samples with the same tokens, the first.
        sizes: bytes of the features that each of `rows` lacked; empty in notes of earlier versions.
    """

    world: int
    rows: tuple[int, ...]
    sizes: tuple[int, ...] = ()

    @classmethod
    def read_or_write(cls, run: CaptureRun, plan: CapturePlan, tokens: Sequence[TokenRow], world: int) -> BatchNote:
        """Return the note of this capture, and write it first if there is none.

        If several ranks write at the same time, the first note counts. No rank captures before a note exists, so all
        ranks use the same one.

        Raises:
            StoreError: the note cannot be written or read.
        """
        path = _find_note(run, tokens)
        jobs = sorted(plan.jobs, key=lambda job: job.row)
        note = cls(world, tuple(job.row for job in jobs), tuple(plan.count_bytes(job) for job in jobs))
        try:
            existing = cls._read(path, len(tokens))
            if existing is not None:
                return existing
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path.parent)
            _publish_once(path, {"world": world, "rows": note.rows, "sizes": note.sizes})
            return cls._read(path, len(tokens)) or note
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be read or written: {error}. Check its permissions and the free space, and capture "
                "again"
            ) from error

    @classmethod
    def _read(cls, path: Path, samples: int) -> BatchNote | None:
        """Return the note, or None if there is none or it is unreadable: missing features are then batched anew."""
        try:
            value = read_json(path)
            world, rows, sizes = value["world"], tuple(value["rows"]), tuple(value.get("sizes", ()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return _discard_unreadable(path)
        sound = all(type(n) is int for n in (world, *rows, *sizes)) and world > 0 and list(rows) == sorted(set(rows))
        sound = sound and len(sizes) in (0, len(rows))
        return (
            cls(world, rows, sizes) if sound and all(0 <= row < samples for row in rows) else _discard_unreadable(path)
        )


Windows = list[Sequence[Sequence[SampleJob]]]


def cut_windows(run: CaptureRun, plan: CapturePlan, tokens: Sequence[TokenRow], rank: int, world: int) -> Windows:
    """Return this rank's batches in their order, in windows of about a shard; those with nothing to store are left out.

    For a backend whose batches are repeatable, jobs without missing features stay in their batch: they are computed
    with the others and not stored. For other backends, only samples with missing features are computed.

    Raises:
        StoreError: the note of the missing samples cannot be written or read.
    """
    limit, shard_bytes = run.capture.batch_tokens, run.capture.shard_mb << 20
    if not plan.jobs:
        return []
    if not find_backend(run.capture.backend).repeatable:
        return list(make_windows(make_batches(plan.select_share(rank, world), limit), plan.count_bytes, shard_bytes))
    note = BatchNote.read_or_write(run, plan, tokens, world)
    missing_jobs = {job.row: job for job in plan.jobs}
    shares: list[list[SampleJob]] = [[] for _ in range(note.world)]
    for row in note.rows:
        job = missing_jobs.pop(row, None) or _make_whole_job(plan.streams, tokens, row)
        shares[job.choose_rank(note.world)].append(job)
    of_ranks = [[*make_batches(share, limit)] for share in shares]
    own = of_ranks[rank] if note.world == world else [batch for batches in of_ranks for batch in batches][rank::world]
    sizes = dict(zip(note.rows, note.sizes, strict=False))
    windows = make_windows(own, lambda job: sizes.get(job.row, plan.count_bytes(job)), shard_bytes)
    lacking = [[batch for batch in window if any(job.missing for job in batch)] for window in windows]
    lost_since = [job for _, job in sorted(missing_jobs.items()) if job.choose_rank(world) == rank]
    again = make_windows(make_batches(lost_since, limit), plan.count_bytes, shard_bytes)
    return [*filter(None, lacking), *again]


def remove_note(run: CaptureRun, tokens: Sequence[TokenRow]) -> None:
    """Remove the note of a capture that is complete."""
    _find_note(run, tokens).unlink(missing_ok=True)


def _make_whole_job(streams: StreamPlan, tokens: Sequence[TokenRow], row: int) -> SampleJob:
    sample = tokens[row]
    return SampleJob(row, sample.sample_id, len(sample.input_ids), streams.make_keys(sample.token_digest), ())


def _find_note(run: CaptureRun, tokens: Sequence[TokenRow]) -> Path:
    """Return the note's path, named by what is to be captured and by what decides how it is cut into batches."""
    streams = StreamPlan.of(run)
    content = hashlib.sha256()
    for row in tokens:
        content.update(f"{row.token_digest}\n".encode())
    keys = sorted(streams.make_keys("").values())
    return run.store.root / FOLDER / f"{digest([keys, content.hexdigest(), run.capture.batch_tokens])}.json"


def _publish_once(path: Path, value: Any) -> None:
    """Write a JSON file unless it exists; a file that another process writes meanwhile is kept."""
    private = path.with_name(f"{path.name}.{os.getpid()}.own")
    try:
        with publish_file(private) as staging:
            staging.write_text(json.dumps(value), encoding="utf-8")
        try:
            os.link(private, path)
        except FileExistsError:
            return
        except OSError:  # the file system has no hard links
            if not path.exists():
                os.replace(private, path)
    finally:
        private.unlink(missing_ok=True)


def _discard_unreadable(path: Path) -> None:
    log.warning("%s is unreadable and was removed: missing features are cut into new batches", path)
    path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process's staging file, meanwhile renamed
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                path.unlink()


@dataclass(frozen=True)
class Progress:
    """Progress of one rank.

    Attributes:
        unit: what is counted: "samples", "conversations".
        done: how many of `total` are done, those of earlier runs included.
        share: finished share of this run's own work, 0 to 1, in the measure that best predicts the remaining time.
        tokens: number of tokens processed in this run, in `seconds`.
    """

    unit: str
    done: int
    total: int
    share: float
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Estimated remaining seconds; None before anything is done."""
        return self.seconds * (1 - self.share) / self.share if self.share else None

    def summarize(self) -> dict[str, float | int | str]:
        """Return the figures for one log line: units done, tokens, tokens per second and remaining time."""
        eta = "?" if self.eta_s is None else _format_duration(self.eta_s)
        rate = round(self.tokens_per_s)
        return {self.unit: f"{self.done}/{self.total}", "tokens": self.tokens, "tokens/s": rate, "eta": eta}


def _format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 40s, 3m05s, 2h30m, 4d06h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


ProgressCallback = Callable[[Progress], None]
