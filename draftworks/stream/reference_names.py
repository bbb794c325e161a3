"""Names of the reference design of this data flow, SpecForge's DataFlow runtime (pull requests 600 and 648), in one place.

Most are this room's own. The classes defined here are faces: the reference's calls, over the control plane and a
content-keyed store. docs/data-flow.md says what each keeps, and what differs and why.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle, KeyedFeatureStore, SampleRef
from draftworks.features.loader import QueueDataLoader
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import OfflineManifestReader
from draftworks.features.memory_store import MemoryFeatureStore
from draftworks.features.wrapped_store import WrappedStore
from draftworks.stream.arrival_producer import drive_producer
from draftworks.stream.arrival_stream import RefDistributor
from draftworks.stream.controller import PAGE, DataFlowController, resolve_control_plane
from draftworks.stream.metadata_store import IDLE_TIMEOUT_S, InFlight, PromptTask
from draftworks.stream.sqlite_metadata_store import InMemoryMetadataStore, SQLiteMetadataStore
from draftworks.stream.step_acks import StepAcks as DPAckController
from draftworks.stream.step_acks import reconcile_on_restart
from draftworks.stream.topologies import (
    build_disagg_offline_runtime,
    build_disagg_online_consumer,
    build_disagg_online_producer,
    build_disagg_online_runtime,
    build_offline_runtime,
    build_online_runtime,
    run_disagg_online_interleaved,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ConsumeOnceStore",
    "DPAckController",
    "DataFlowController",
    "InMemoryMetadataStore",
    "LocalFeatureStore",
    "MemoryFeatureStore",
    "OfflineManifestReader",
    "PromptTask",
    "QueueDataLoader",
    "RefDistributor",
    "SQLiteMetadataStore",
    "SampleRef",
    "SampleRefQueue",
    "StreamingRefChannel",
    "build_disagg_offline_runtime",
    "build_disagg_online_consumer",
    "build_disagg_online_producer",
    "build_disagg_online_runtime",
    "build_offline_runtime",
    "build_online_runtime",
    "drive_producer",
    "reconcile_on_restart",
    "resolve_control_plane",
    "run_disagg_online_interleaved",
]
_END = "channel_end"


class StreamingRefChannel:
    """References of a run: any producer publishes, its consumer polls and marks them consumed."""

    def __init__(
        self, controller: DataFlowController, skip_ids: Iterable[str] = (), idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> None:
        self._controller, self._cursor = controller, 0
        self._skip, self._idle_timeout_s = frozenset(skip_ids), idle_timeout_s

    def publish_batch(self, refs: Sequence[SampleRef]) -> int:
        """Append references; return how many are new. A second one of a sample is left out."""
        return len(self._controller.commit_samples(refs).committed)

    def poll(self, count: int = PAGE, wait_s: float | None = None) -> list[SampleRef]:
        """Return the next references; none at the end, or after `wait_s`. StoreError if a side failed, or none came."""
        since = time.monotonic()
        while True:
            end, page = _read_end(self._controller), self._controller.read_refs(self._cursor, count, acked=False)
            self._cursor, waited = page.cursor, time.monotonic() - since
            refs = [ref for ref in page.refs if ref.sample_id not in self._skip]
            if refs or (not page.refs and (end == "" or (wait_s is not None and waited >= wait_s))):
                return refs
            if not page.refs and waited >= self._idle_timeout_s:
                raise StoreError(f"no reference came for {waited:.1f} s: no producer publishes, and none has closed")
            time.sleep(0 if page.refs else 0.01)

    def mark_consumed(self, sample_ids: Sequence[str]) -> None:
        """Count references as consumed, durably; StoreError for one that is not published."""
        self._controller.ack(sample_ids, self._controller.read_progress().acked_step + 1)

    @property
    def in_flight_remote(self) -> InFlight:
        """What is published and not consumed."""
        return sum(
            (InFlight(1, each.estimated_bytes) for each in self._controller.iterate_refs(acked=False)), InFlight()
        )

    def close(self, reason: str = "") -> None:
        """End the stream; what is published is still polled. With a reason, the other side raises it."""
        self._controller.record_fact(_END, reason)

    fail = close


def _read_end(controller: DataFlowController) -> str | None:
    """Return the empty mark at the end of a channel, None before it; asked before a look, nothing comes after it.

    Raises:
        StoreError: with the reason of a side that failed.
    """
    end = controller.read_facts().get(_END)
    if end:
        raise StoreError(f"the other side of the references has failed: {end}")
    return end


class SampleRefQueue:
    """A channel between threads of one process, with the calls of a queue."""

    def __init__(self, skip_ids: Iterable[str] = (), idle_timeout_s: float = IDLE_TIMEOUT_S) -> None:
        controller = DataFlowController("queue", InMemoryMetadataStore())
        self._channel = StreamingRefChannel(controller, skip_ids, idle_timeout_s)
        self._given_back: list[SampleRef] = []
        self._handed_out: dict[str, SampleRef] = {}
        self.put, self.close, self.abort = self._channel.publish_batch, self._channel.close, self._channel.fail

    def get(self, count: int, wait_s: float | None = None) -> list[SampleRef]:
        """Return the next references, those that were given back first."""
        refs, self._given_back = self._given_back[:count], self._given_back[count:]
        refs = refs or self._channel.poll(count, wait_s)
        self._handed_out.update((ref.sample_id, ref) for ref in refs)
        return refs

    def ack(self, sample_ids: Sequence[str]) -> None:
        """Count handed-out references as consumed."""
        self.fail(sample_ids)
        self._channel.mark_consumed(sample_ids)

    def fail(self, sample_ids: Sequence[str], *, requeue: bool = False) -> None:
        """Give handed-out references up; with `requeue` they come again. ValueError for one that is not handed out."""
        unknown = [sample_id for sample_id in sample_ids if sample_id not in self._handed_out]
        if unknown:
            raise ValueError(f"samples {unknown} are not handed out")
        refs = [self._handed_out.pop(sample_id) for sample_id in sample_ids]
        self._given_back = [*refs, *self._given_back] if requeue else self._given_back


class ConsumeOnceStore(WrappedStore):
    """Frees a sample when its last lease ends, unless another sample has the key. A stale handle releases nothing."""

    def __init__(self, store: KeyedFeatureStore, retain_on_release: bool = False) -> None:
        super().__init__(store)
        self.retain_on_release = retain_on_release
        self._keyed = store
        self._uses: Counter[str] = Counter()
        self._leases: dict[str, SampleRef] = {}

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        self._uses.update(set(ref.feature_keys.values()))
        return super().put(ref, tensors)

    def get(self, ref: SampleRef) -> tuple[dict[str, Tensor], FeatureHandle]:
        tensors, handle = super().get(ref)
        self._leases[handle.lease_token] = ref
        return tensors, handle

    def release(self, handle: FeatureHandle) -> None:
        super().release(handle)
        ref = self._leases.pop(handle.lease_token, None)
        others = [each for each in self._leases.values() if ref is not None and each.sample_id == ref.sample_id]
        if ref is None or others or self.retain_on_release:
            return
        self._uses.subtract(set(ref.feature_keys.values()))
        self._keyed.free([key for key in ref.feature_keys.values() if self._uses[key] <= 0])
