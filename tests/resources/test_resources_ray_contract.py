"""The contract of launchers, over a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coverings import long_but_for
from launcher_contract import IN_GATE, SchedulerContract
from ray_cluster import RayCluster
from ray_harness import RayHarness


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster.start() as cluster:
        RayHarness.use(cluster)
        yield cluster


@pytest.mark.ray
@long_but_for(*IN_GATE)
class TestRay(SchedulerContract):
    @pytest.fixture
    def harness(self, cluster: RayCluster, tmp_path: Path) -> RayHarness:
        return RayHarness(tmp_path)
