"""The contract of launchers, over a real Slurm of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coverings import long_but_for
from launcher_contract import IN_GATE, SchedulerContract
from slurm_cluster import SlurmCluster
from slurm_harness import COMMANDS, SlurmHarness

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@long_but_for(*IN_GATE)
class TestSlurm(SchedulerContract):
    @pytest.fixture
    def harness(self, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmHarness]:
        monkeypatch.setenv(COMMANDS, str(slurm.commands))
        yield SlurmHarness(tmp_path)
        slurm.empty()
