"""A scheduler in a folder: jobs are processes that outlive who submitted them, several processes may use it at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import toy_node
from waiting import wait_until

from draftworks.config import launchers
from draftworks.config.launchers import SchedulerLauncherSpec
from draftworks.errors import ConfigError, LauncherError
from resources.scheduler import SCHEDULERS, JobRequest, Scheduler, SeenJob
from resources.torch_job import JobState

QUEUE_REASON = "Resources: no node is free"


class ToyLauncherSpec(SchedulerLauncherSpec):
    kind: Literal["toy"] = "toy"
    root: str


def offer_toy() -> None:
    """Make the kind `toy` known to this process, as a landed kind is."""
    launchers.KINDS["toy"] = ToyLauncherSpec
    SCHEDULERS["toy"] = "toy_scheduler"


def make_scheduler(spec: ToyLauncherSpec) -> ToyScheduler:
    return ToyScheduler(Path(spec.root), spec.time_limit_s)


@dataclass(frozen=True)
class ToyScheduler(Scheduler):
    """Files in `root` play what happens to schedulers: `full` (jobs wait), `refuses` (its words), `silent` (no answer)."""

    root: Path
    time_limit_s: float | None = None
    engine = "toy"

    def create(self, request: JobRequest) -> str:
        self._answer()
        if (self.root / "refuses").exists():
            raise ConfigError(f"toy: {(self.root / 'refuses').read_text()}")
        folder = self._make_folder()
        values = {
            "name": request.name,
            "claim": str(request.claim),
            "module": request.job.module,
            "args": list(request.job.args),
            "procs": request.job.procs_per_node,
            "nodes": [request.min_nodes or request.job.nodes, request.job.nodes],
            "env": {**request.job.env, **request.env},
            "log": str(request.files.log),
            "ranks": str(request.files.ranks),
            "time_limit_s": self.time_limit_s,
        }
        toy_node.write_json(folder / "job.json", values)
        node = subprocess.Popen(
            [sys.executable, toy_node.__file__, str(folder)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "node.log").open("ab"),
        )
        (folder / "pid").write_text(str(node.pid))
        return folder.name

    def find(self, name: str) -> SeenJob | None:
        seen = [each for each in self.look_at_all() if each.name == name]
        return next((each for each in seen if not each.state.is_final), seen[-1] if seen else None)

    def look(self, id: str) -> SeenJob | None:
        self._answer()
        folder = self.root / id
        try:
            job = json.loads((folder / "job.json").read_text())
        except OSError:
            return None
        found = {"state": "pending", "reason": QUEUE_REASON}
        with suppress(OSError):
            found = json.loads((folder / "state.json").read_text())
        return SeenJob(
            id=id,
            name=job["name"],
            state=JobState(found["state"]),
            reason=found.get("reason", ""),
            lost=found.get("lost", False),
            claim=Path(job["claim"]),
        )

    def end(self, id: str, grace_s: float) -> None:
        self._ask(id, "end", str(grace_s))

    def preempt(self, id: str) -> None:
        self._ask(id, "preempt", "")

    def list(self) -> list[SeenJob]:
        return [each for each in self.look_at_all() if not each.state.is_final]

    def look_at_all(self) -> list[SeenJob]:
        """Return all jobs, the oldest first."""
        self._answer()
        names = sorted(path.parent.name for path in self.root.glob("*/job.json"))
        return [seen for name in names if (seen := self.look(name)) is not None]

    def _ask(self, id: str, what: str, text: str) -> None:
        seen = self.look(id)
        if seen is None or seen.state.is_final:
            return
        toy_node_request = self.root / id / what
        toy_node_request.with_suffix(".tmp").write_text(text)
        os.replace(toy_node_request.with_suffix(".tmp"), toy_node_request)
        wait_until(lambda: (now := self.look(id)) is None or now.state.is_final, f"the end of toy job {id}")

    def _answer(self) -> None:
        if (self.root / "silent").exists():
            raise LauncherError("toy: the scheduler does not answer")

    def _make_folder(self) -> Path:
        while True:
            folder = self.root / f"{len(list(self.root.glob('[0-9]*'))) + 1:04}"
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
