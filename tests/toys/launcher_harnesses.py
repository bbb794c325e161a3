"""The launchers that need nothing but this machine, for their contract."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from launcher_contract import LauncherHarness
from toy_scheduler import ToyScheduler, offer_toy

from draftworks.config.launchers import LocalLauncherSpec
from resources.deployment_launcher import make_launcher
from resources.scheduler_launcher import SchedulerLauncher
from resources.torch_launcher import TorchLauncher


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return the living processes of contract workers in a folder, and those that started them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if str(folder / "work") in arguments and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class LocalHarness(LauncherHarness):
    def make_settings(self, **keys: Any) -> dict[str, Any]:
        return {"grace_s": self.grace_s, **keys}

    def make_launcher(self, **keys: Any) -> TorchLauncher:
        return make_launcher(LocalLauncherSpec(**self.make_settings(**keys)))

    def list_left(self) -> list[str]:
        found = []
        for process in find_processes(self.folder):
            with suppress(psutil.Error):  # it has ended meanwhile
                found.append(" ".join(process.cmdline()))
        return found

    def clean_up(self) -> None:
        for process in find_processes(self.folder):
            with suppress(psutil.Error):
                process.kill()


class ToyHarness(LocalHarness):
    survives = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        offer_toy()
        self.scheduler.root.mkdir(exist_ok=True)

    @property
    def scheduler(self) -> ToyScheduler:
        return ToyScheduler(self.folder / "toy")

    def make_settings(self, **keys: Any) -> dict[str, Any]:
        return {
            "kind": "toy",
            "root": str(self.scheduler.root),
            "grace_s": self.grace_s,
            "poll_interval_s": 0.05,
            **keys,
        }

    def make_launcher(self, **keys: Any) -> SchedulerLauncher:
        return SchedulerLauncher(settings=json.dumps(self.make_settings(**keys)), files_lag_s=0.3)

    def list_left(self) -> list[str]:
        return [each.id for each in self.scheduler.list()] + super().list_left()

    def count_submitted(self) -> int:
        return len(self.scheduler.look_at_all())

    def preempt(self) -> None:
        (running,) = self.scheduler.list()
        self.scheduler.preempt(running.id)

    def clean_up(self) -> None:
        for name in ("silent", "full"):
            (self.scheduler.root / name).unlink(missing_ok=True)
        for each in self.scheduler.list():
            self.scheduler.end(each.id, 0.0)
        super().clean_up()


@dataclass
class QueueClock:
    """Goes on by seconds with each look as long as the queue is full, and stands still later: no load makes a job stall."""

    full: Path
    seconds: float = 0.0

    def __call__(self) -> float:
        self.seconds += 5.0 if self.full.exists() else 0.0
        return self.seconds


class QueueHarness(ToyHarness):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.clock = QueueClock(self.scheduler.root / "full")

    def make_launcher(self, **keys: Any) -> SchedulerLauncher:
        launcher = super().make_launcher(**keys)
        launcher._clock = self.clock
        return launcher
