"""A worker's leases stay its own while it works, also where a renewal failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dataflow_toys import toy_task
from waiting import wait_until

from draftworks.errors import StoreError
from draftworks.stream.controller import DataFlowController
from draftworks.stream.leases import LeaseKeeper
from draftworks.stream.metadata_store import TaskCounts
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore


class BusyOnce(SQLiteMetadataStore):
    """Refuses the first renewal."""

    renewals = 0

    def renew_leases(self, *words: object) -> Sequence[str]:
        self.renewals += 1
        if self.renewals == 1:
            raise StoreError("the control-plane database is busy")
        return super().renew_leases(*words)  # type: ignore[arg-type,return-value]


def test_one_failed_renewal_ends_no_lease(tmp_path: Path):
    store = BusyOnce(tmp_path / "plane.db")
    controller = DataFlowController("run", store, lease_s=3.0)
    controller.add_tasks([toy_task(0)])
    keeper = LeaseKeeper(controller)
    with keeper.renewing():
        (lease,) = controller.lease_tasks("worker")
        keeper.add(lease)
        wait_until(lambda: store.renewals >= 6, "renewals beyond the end of the first lease")
        assert controller.lease_tasks("other") == ()
        assert controller.count_tasks() == TaskCounts(leased=1)
