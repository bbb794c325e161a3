"""Claims of processes that capture into one store at the same time: each feature is captured by one of them.

    {store}/claims/all.lock       held for a moment by who takes or gives back
    {store}/claims/{id}.keys      feature keys that a process is capturing, one a line
    {store}/claims/{id}.lock      held by that process; it goes with it, and so does the claim

Claims only avoid duplicate work: keys are content digests, so features captured twice are the same.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from draftworks.capture.plan import SampleJob
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.storage.atomic import publish_file
from draftworks.storage.file_lock import hold_lock

log = logging.getLogger(__name__)

Batches = Sequence[Sequence[SampleJob]]


@dataclass(frozen=True)
class Claimed:
    """What a process may capture of what it asked for, and a lock that one of those who have the rest holds."""

    own: frozenset[str]
    busy: Path | None = None


class Claims:
    """The claims on the features of a store, in its folder `claims`."""

    def __init__(self, store_root: Path) -> None:
        self._folder = store_root / "claims"

    @contextmanager
    def take(self, keys: Collection[str]) -> Iterator[Claimed]:
        """Claim those of the keys that no other living process has, for as long as the block lasts."""
        claim = self._folder / uuid.uuid4().hex
        lock = FileLock(claim.with_suffix(".lock"), thread_local=False)
        try:
            taken = self._claim(claim, lock, frozenset(keys))
        except (OSError, NotImplementedError) as error:
            lock.release()
            log.warning("%s: nothing can be claimed (%s): what two runs want, both may capture", self._folder, error)
            yield Claimed(frozenset(keys))
            return
        try:
            yield taken
        finally:
            self._give_back(claim, lock)

    def _claim(self, claim: Path, lock: FileLock, keys: frozenset[str]) -> Claimed:
        self._folder.mkdir(exist_ok=True)
        with self._lock_folder():
            left, busy = keys, None
            for path in self._folder.glob("*.keys"):
                others = _read_living_claim(path)
                if not left.isdisjoint(others):
                    left, busy = left - others, path.with_suffix(".lock")
            lock.acquire(timeout=0)
            with publish_file(claim.with_suffix(".keys")) as staging:
                staging.write_text("".join(f"{key}\n" for key in left))
        return Claimed(left, busy)

    def _give_back(self, claim: Path, lock: FileLock) -> None:
        """Its keys first: whoever finds these without a holder takes them for those of a dead process."""
        claim.with_suffix(".keys").unlink(missing_ok=True)
        lock.release()
        claim.with_suffix(".lock").unlink(missing_ok=True)

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        with hold_lock(self._folder / "all.lock", f"another process is looking at {self._folder}: waiting for it"):
            yield


def _read_living_claim(path: Path) -> frozenset[str]:
    """The keys of a claim whose process lives; that of a dead one is removed."""
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        try:
            return frozenset(path.read_text().split())
        except FileNotFoundError:
            return frozenset()  # given back just now
    path.unlink(missing_ok=True)
    lock.release()
    path.with_suffix(".lock").unlink(missing_ok=True)
    return frozenset()


def share_out(
    windows: Sequence[Batches], store: KeyedFeatureStore, claims: Claims, whole: bool = False
) -> Generator[Batches, None, None]:
    """What is still to be captured of each window, and by nobody else at this moment; it is on disk when the next is asked for.

    Windows that others are capturing come again once those have ended: then it is in the store, or left to this process.

    Args:
        whole: batches keep their samples, also those of which nothing is to be stored: what is computed together decides the
            last bits.

    Raises:
        StoreError: shards of the store are damaged.
    """
    left = list(windows)
    while left:
        later: list[Batches] = []
        busy: Path | None = None
        for window in left:
            keys = _collect_keys(window)
            with claims.take(keys) as taken:
                store.refresh()
                lacking = frozenset(store.find_missing(keys))
                own = _restrict(window, lacking & taken.own, whole)
                if own:
                    yield own
                    store.flush()
            theirs = _restrict(window, lacking - taken.own, whole)
            if theirs:
                later.append(theirs)
                busy = taken.busy or busy
        if later and busy is not None:
            _wait(busy, samples=sum(bool(job.missing) for window in later for batch in window for job in batch))
        left = later


def _wait(busy: Path, samples: int) -> None:
    """Until the process that holds a lock has given it back."""
    with hold_lock(busy, f"another run is capturing {samples} samples that this one needs too: waiting for it"):
        busy.unlink(missing_ok=True)


def _collect_keys(window: Batches) -> set[str]:
    return {job.keys[name] for batch in window for job in batch for name in job.missing}


def _restrict(window: Batches, keys: frozenset[str], whole: bool) -> Batches:
    """The window without what is not among the keys, and without batches of which nothing is left."""
    trimmed = [[_restrict_job(job, keys) for job in batch] for batch in window]
    kept = [[job for job in batch if whole or job.missing] for batch in trimmed]
    return [batch for batch in kept if any(job.missing for job in batch)]


def _restrict_job(job: SampleJob, keys: frozenset[str]) -> SampleJob:
    return replace(job, missing=tuple(name for name in job.missing if job.keys[name] in keys))
