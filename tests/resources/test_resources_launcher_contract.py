"""The contract of launchers, over those that need nothing but this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverings import long_but_for
from launcher_contract import IN_GATE, LauncherContract, SchedulerContract
from launcher_harnesses import LocalHarness, ToyHarness


# Of the launcher itself; what only a scheduler does is asked of the toy one.
@long_but_for(*(name for name in IN_GATE if hasattr(LauncherContract, name)))
class TestLocal(LauncherContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> LocalHarness:
        return LocalHarness(tmp_path)


class TestScheduler(SchedulerContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> ToyHarness:
        return ToyHarness(tmp_path)
