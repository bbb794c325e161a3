"""A feature store whose `get` waits for features that a producer is still capturing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef
from draftworks.features.wrapped_store import WrappedStore

if TYPE_CHECKING:
    from torch import Tensor

POLL_S = 0.01
LOOK_S = 1.0
"""Between two looks at the producers while waiting."""


class AwaitedStore(WrappedStore):
    """Reads planned features from `store`; waits for those that are not there yet.

    A sample that will never come is given up: random numbers are returned in its place. A rank that raised an error
    instead would leave the others waiting in a collective; the training discards the step on all ranks.

    Attributes:
        waited_s: seconds that all calls of `get` together have waited.
        given_up: ids of the samples that random numbers were returned for. Once there is one, no other is waited for.

    Args:
        timeout_s: how long one sample may be waited for.
        look: called about once a second while waiting, with the sample that is missing; asks for features that were
            lost to be captured again, and returns whether the sample will never come.
        explain: called when the time is over; returns what else may be the reason, empty for nothing.
    """

    def __init__(
        self,
        store: KeyedFeatureStore,
        timeout_s: float,
        look: Callable[[SampleRef], bool] = lambda ref: False,
        explain: Callable[[], str] = str,
    ) -> None:
        super().__init__(store)
        self._keyed = store
        self._timeout_s = timeout_s
        self._look = look
        self._explain = explain
        self.waited_s = 0.0
        self.given_up: set[str] = set()
        self._stops = 0

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        """Fetch as `FeatureStore.get`. Features that are lost before they are read are waited for again.

        Raises:
            StoreError: the features have not come within `timeout_s` seconds.
        """
        started, stops = time.monotonic(), self._stops
        while True:
            if not self._wait(ref, started, stops):
                self.given_up.add(ref.sample_id)
                return _make_random(ref), FeatureHandle(ref.sample_id, "")
            try:
                return self._store.get(ref)
            except StoreError:
                if not self._keyed.find_missing(ref.feature_keys.values()):
                    raise

    def _wait(self, ref: SampleRef, started: float, stops: int) -> bool:
        """Wait for a sample's features; return False if they will never come."""
        began = looked = time.monotonic()
        while self._keyed.find_missing(ref.feature_keys.values()):
            now = time.monotonic()
            if self._stops != stops:
                raise StoreError(f"sample {ref.sample_id} is not waited for any more: the reader has stopped")
            if now - started > self._timeout_s:
                reason = self._explain() or "Look at the producers' logs"
                raise StoreError(
                    f"sample {ref.sample_id}: its features have not come within {self._timeout_s:g} s. {reason}, or "
                    "raise streaming.timeout_s if they are slow"
                )
            if self.given_up or (now - looked > LOOK_S and self._look(ref)):
                return False
            looked = now if now - looked > LOOK_S else looked
            time.sleep(POLL_S)
            self._keyed.refresh()
        self.waited_s += time.monotonic() - began
        return True

    def release(self, handle: FeatureHandle) -> None:
        if handle.sample_id not in self.given_up:
            self._store.release(handle)

    def stop_waiting(self) -> None:
        self._stops += 1


def _make_random(ref: SampleRef) -> dict[str, Tensor]:
    """Return tensors of a sample's shapes and dtypes, normally distributed, so that no norm of them is zero."""
    from draftworks.features.scaled_fp8 import make_random_stored

    return {name: make_random_stored(spec.shape, spec.dtype) for name, spec in ref.feature_specs.items()}
