"""The contract of launchers, over those that need nothing but this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher_contract import LauncherContract, SchedulerContract
from launcher_harnesses import LocalHarness, ToyHarness


class TestLocal(LauncherContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> LocalHarness:
        return LocalHarness(tmp_path)


class TestScheduler(SchedulerContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> ToyHarness:
        return ToyHarness(tmp_path)
