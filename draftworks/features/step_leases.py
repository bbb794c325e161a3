"""Leases of samples that were read for training, held until their optimizer step is acknowledged."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftworks.features.contracts import FeatureHandle, FeatureStore
from draftworks.storage.words import list_names


@dataclass
class _Step:
    samples: Counter[str] = field(default_factory=Counter)
    handles: list[FeatureHandle] = field(default_factory=list)
    is_whole: bool = False


class StepLeases:
    """The leases of one rank, by optimizer step in the order of training.

    Reading ahead takes leases in other threads; only batches that are handed out belong to a step. What was read and
    never handed out keeps its lease until `release_all`, because a consume-once store frees what is released.
    """

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self._steps: deque[_Step] = deque()
        self._open: dict[str, FeatureHandle] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Leases that are held."""
        with self._lock:
            return len(self._open)

    @property
    def last_step(self) -> tuple[str, ...]:
        """Samples of the step that was handed out last, as often as they were in it."""
        with self._lock:
            return tuple(self._steps[-1].samples.elements()) if self._steps else ()

    def take(self, handle: FeatureHandle) -> None:
        """Hold a lease that reading has just got."""
        with self._lock:
            self._open[handle.lease_token] = handle

    def hand_out(self, sample_ids: Iterable[str], handles: Iterable[FeatureHandle], ends_step: bool) -> None:
        """Count a batch to the optimizer step that is being trained."""
        with self._lock:
            if not self._steps or self._steps[-1].is_whole:
                self._steps.append(_Step())
            step = self._steps[-1]
            step.samples.update(sample_ids)
            step.handles.extend(handles)
            step.is_whole = ends_step

    def release(self, sample_ids: Sequence[str]) -> None:
        """Release the leases of the oldest steps, whose samples on this rank are exactly `sample_ids`.

        Raises:
            ValueError: these are not the samples of the oldest whole steps; nothing is released.
        """
        left, done = Counter(sample_ids), 0
        with self._lock:
            for step in self._steps:
                if not left or not step.is_whole or not step.samples <= left:
                    break
                left -= step.samples
                done += 1
            if left:
                raise ValueError(
                    f"samples {list_names(sorted(left))} do not end the oldest of the {len(self._steps)} optimizer steps that are "
                    "not acknowledged"
                )
            handles = [handle for _ in range(done) for handle in self._steps.popleft().handles]
        self._release(handles)

    def release_all(self) -> None:
        """Release every lease, also of batches that were read ahead and never trained."""
        with self._lock:
            self._steps.clear()
            handles = list(self._open.values())
        self._release(handles)

    def _release(self, handles: Iterable[FeatureHandle]) -> None:
        for handle in handles:
            with self._lock:
                held = self._open.pop(handle.lease_token, None)
            if held is not None:
                self._store.release(held)
