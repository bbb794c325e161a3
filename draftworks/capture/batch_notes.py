"""Batches of a capture, fixed when it begins: the composition of a batch decides the last bits of its features.

The samples that lack features when a capture begins are written to a note beside the store. A capture that resumes
after an interruption cuts the same batches from that note, on any number of ranks. A batch of which some features are
stored already is computed whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.capture.engine import find_backend
from draftworks.capture.plan import CapturePlan, SampleJob, StreamPlan, make_batches
from draftworks.config.run_files import CaptureRun
from draftworks.data.token_rows import TokenRow
from draftworks.errors import StoreError
from draftworks.storage.atomic import publish_file
from draftworks.storage.identity import digest
from draftworks.storage.regular_files import read_json

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
    """

    world: int
    rows: tuple[int, ...]

    @classmethod
    def read_or_write(cls, run: CaptureRun, plan: CapturePlan, tokens: Sequence[TokenRow], world: int) -> BatchNote:
        """Return the note of this capture, and write it first if there is none.

        If several ranks write at the same time, the first note counts. No rank captures before a note exists, so all
        ranks use the same one.

        Raises:
            StoreError: the note cannot be written or read.
        """
        path = _find_note(run, tokens)
        note = cls(world, tuple(sorted(job.row for job in plan.jobs)))
        try:
            existing = cls._read(path, len(tokens))
            if existing is not None:
                return existing
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path.parent)
            _publish_once(path, {"world": world, "rows": note.rows})
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
            world, rows = value["world"], tuple(value["rows"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError):
            return _discard_unreadable(path)
        sound = all(type(n) is int for n in (world, *rows)) and world > 0 and list(rows) == sorted(set(rows))
        return cls(world, rows) if sound and all(0 <= row < samples for row in rows) else _discard_unreadable(path)


def cut_batches(
    run: CaptureRun, plan: CapturePlan, tokens: Sequence[TokenRow], rank: int, world: int
) -> list[list[SampleJob]]:
    """Return this rank's batches, in their order.

    For a backend whose batches are repeatable, jobs without missing features stay in their batch: they are computed
    with the others and not stored. For other backends, only samples with missing features are computed.

    Raises:
        StoreError: the note of the missing samples cannot be written or read.
    """
    limit = run.capture.batch_tokens
    if not plan.jobs:
        return []
    if not find_backend(run.capture.backend).repeatable:
        return list(make_batches(plan.select_share(rank, world), limit))
    note = BatchNote.read_or_write(run, plan, tokens, world)
    missing_jobs = {job.row: job for job in plan.jobs}
    shares: list[list[SampleJob]] = [[] for _ in range(note.world)]
    for row in note.rows:
        job = missing_jobs.pop(row, None) or _make_whole_job(plan.streams, tokens, row)
        shares[job.choose_rank(note.world)].append(job)
    of_ranks = [[*make_batches(share, limit)] for share in shares]
    own = of_ranks[rank] if note.world == world else [batch for batches in of_ranks for batch in batches][rank::world]
    repeated = [batch for batch in own if any(job.missing for job in batch)]
    lost_since = [job for _, job in sorted(missing_jobs.items()) if job.choose_rank(world) == rank]
    return [*repeated, *make_batches(lost_since, limit)]


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
        if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
            path.unlink(missing_ok=True)
