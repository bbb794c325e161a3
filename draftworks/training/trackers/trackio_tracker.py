"""Reports a training to Trackio, on this machine alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from draftworks.config.trackers import TrackioSpec
from draftworks.training.trackers.tracker import Outcome, TrackedRun


class TrackioTracker:
    """A run of Trackio. Runs have no ids there, so the id is part of the name."""

    def __init__(self, spec: TrackioSpec, run: TrackedRun) -> None:
        if spec.folder is not None:
            os.environ["TRACKIO_DIR"] = spec.folder  # read once, when the library is imported
        import trackio  # pyright: ignore[reportMissingImports]

        self._run: Any = trackio.init(
            project=spec.project,
            name=f"{run.tags['target']}-{run.tags['strategy']}-{run.id}",
            group=run.tags["draft"],
            config={**run.parameters, **run.tags},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()
