"""Claims of processes that capture into one store at the same time: each feature is captured by one of them.

    {store}/claims/all.lock       held briefly by a process that takes claims
    {store}/claims/{id}.keys      feature keys that a process is capturing, one per line
    {store}/claims/{id}.lock      lease file of that process; when the process ends, the claim ends too

Claims only avoid duplicate work: keys are content digests, so features captured twice are the same.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from draftworks.capture.capture_plan import SampleJob
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.storage.file_lock import REMINDER_S, hold_lock
from draftworks.storage.files import publish_file
from draftworks.storage.lease import DEFAULT_TIMES, Lease, LeaseFile, LeaseTimes, LeaseWatch

POLL_S = 0.05

log = logging.getLogger(__name__)

Batches = Sequence[Sequence[SampleJob]]


@dataclass(frozen=True)
class Claimed:
    """The feature keys that a process may capture, and the lock of one process that has claimed the others.

    Attributes:
        own: those of the requested keys that this process has claimed.
        busy: lease file of one of the processes that hold the rest; None if no other process holds any.
    """

    own: frozenset[str]
    busy: Path | None = None


@dataclass(frozen=True)
class Share:
    """Batches that this process captures, under a claim that holds until `finish`, which publishes their features.

    Several shares may be held at a time, and are finished in their order. One without batches asks to finish all others
    first: after it another process is waited for, which may be waiting for them.
    """

    batches: Batches = ()
    finish: Callable[[], None] = lambda: None


class Claims:
    """Claims on the features of a store, kept in its folder `claims`.

    Args:
        times: how claims of processes on other hosts are kept.
    """

    def __init__(self, store_root: Path, times: LeaseTimes = DEFAULT_TIMES) -> None:
        self._folder = store_root / "claims"
        self._times = times
        self._watch = LeaseWatch(times)

    @contextmanager
    def take(self, keys: Collection[str]) -> Iterator[Claimed]:
        """Claim the keys that no other living process has claimed, until the `with` block ends.

        Where no claim can be made, all keys are returned with a warning: two runs may then capture the same features.
        """
        claim = self._folder / uuid.uuid4().hex
        with ExitStack() as holding:
            try:
                claimed = self._claim(claim, holding, frozenset(keys))
            except OSError as error:
                holding.close()
                log.warning(
                    "%s: claims are not possible (%s): two runs may capture the same features", self._folder, error
                )
                claimed = Claimed(frozenset(keys))
            yield claimed

    def wait_for(self, busy: Path, waiting: str) -> None:
        """Wait until the process that holds a claim has given it back or ended.

        Args:
            waiting: log message while it does not.
        """
        started = time.monotonic()
        remind_at = started
        while not self._watch.look(busy).is_free:
            if time.monotonic() >= remind_at:
                log.info(waiting if remind_at == started else f"{waiting} ({time.monotonic() - started:.0f} s so far)")
                remind_at += REMINDER_S
            time.sleep(POLL_S)

    def _claim(self, claim: Path, holding: ExitStack, keys: frozenset[str]) -> Claimed:
        self._folder.mkdir(exist_ok=True)
        with self._lock_folder():
            self._sweep()
            left, busy = keys, None
            for path in self._folder.glob("*.keys"):
                others = self._read_active_claim(path)
                if not left.isdisjoint(others):
                    left, busy = left - others, path.with_suffix(".lock")
            lease = LeaseFile.create(claim.with_suffix(".lock"), self._times)
            assert lease is not None, "the claim's name is its own"
            holding.callback(lease.remove)
            # Removed before the lease: keys without a lease would look like those of a dead process.
            holding.callback(claim.with_suffix(".keys").unlink, missing_ok=True)
            with publish_file(claim.with_suffix(".keys")) as staging:
                staging.write_text("".join(f"{key}\n" for key in left))
        return Claimed(left, busy)

    def _sweep(self) -> None:
        """Remove what processes killed while they made or gave back a claim have left; the folder's lock is held."""
        for path in self._folder.glob(".*"):
            if path.is_file():
                path.unlink(missing_ok=True)
        for lock in self._folder.glob("*.lock"):
            if lock.is_file() and not lock.with_suffix(".keys").exists() and self._watch.look(lock).is_free:
                lock.unlink(missing_ok=True)

    def _lock_folder(self) -> AbstractContextManager[Lease]:
        busy = f"another process has locked {self._folder}: waiting for it"
        return hold_lock(self._folder / "all.lock", busy, times=self._times)

    def _read_active_claim(self, path: Path) -> frozenset[str]:
        """Return the keys of a claim if its process is alive; remove the claim of a dead process and return no keys."""
        lock = path.with_suffix(".lock")
        if self._watch.look(lock).is_free:
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            return frozenset()
        try:
            return frozenset(path.read_text().split())
        except FileNotFoundError:
            return frozenset()  # the process has just given its claim back


def share_out(
    windows: Sequence[Batches], store: KeyedFeatureStore, claims: Claims, keep_whole_batches: bool = False
) -> Generator[Share, None, None]:
    """Yield, for each window, the batches that still lack features and that no other process is capturing now.

    A window that another process is capturing is looked at again when that process has ended: its features are then in
    the store, or left to this process. When the generator is closed, claims that were not finished are given back.

    Args:
        keep_whole_batches: whether batches keep all their samples, also those of which nothing is to be stored, because
            the composition of a batch decides the last bits of its features.

    Raises:
        StoreError: shards of the store are damaged.
    """
    left = list(windows)
    held: list[ExitStack] = []

    def give_back(claim: ExitStack) -> None:
        held.remove(claim)
        claim.close()

    def finish(claim: ExitStack) -> None:
        store.flush()
        give_back(claim)

    try:
        while left:
            later: list[Batches] = []
            busy: Path | None = None
            for window in left:
                keys, claim = _collect_keys(window), ExitStack()
                held.append(claim)
                claimed = claim.enter_context(claims.take(keys))
                store.refresh()
                lacking = frozenset(store.find_missing(keys))
                own = _restrict(window, lacking & claimed.own, keep_whole_batches)
                theirs = _restrict(window, lacking - claimed.own, keep_whole_batches)
                if theirs:
                    later.append(theirs)
                    busy = claimed.busy or busy
                if own:
                    yield Share(own, partial(finish, claim))
                else:
                    give_back(claim)
            if later and busy is not None:
                yield Share()
                samples = sum(bool(job.missing) for window in later for batch in window for job in batch)
                claims.wait_for(
                    busy, f"another run is capturing {samples} samples that this one needs too: waiting for it"
                )
            left = later
    finally:
        for claim in held:
            claim.close()


def _collect_keys(window: Batches) -> set[str]:
    return {job.keys[name] for batch in window for job in batch for name in job.missing}


def _restrict(window: Batches, keys: frozenset[str], keep_whole_batches: bool) -> Batches:
    """Return the window restricted to the given keys, without batches of which nothing is left to store."""
    trimmed = [[_restrict_job(job, keys) for job in batch] for batch in window]
    kept = [[job for job in batch if keep_whole_batches or job.missing] for batch in trimmed]
    return [batch for batch in kept if any(job.missing for job in batch)]


def _restrict_job(job: SampleJob, keys: frozenset[str]) -> SampleJob:
    return replace(job, missing=tuple(name for name in job.missing if job.keys[name] in keys))
