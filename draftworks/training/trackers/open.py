"""Opens the trackers of a training, and closes them when it ends in whatever way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from draftworks.config.run_files import TRACKERS_FOLDER
from draftworks.config.trackers import TrackersSpec, require_trackers
from draftworks.distributed.stop_signals import Interrupted
from draftworks.training.trackers.background import BackgroundTracker
from draftworks.training.trackers.mlflow_tracker import MlflowTracker
from draftworks.training.trackers.sent_steps import SentSteps
from draftworks.training.trackers.tracker import Outcome, TrackedRun, Tracker
from draftworks.training.trackers.trackio_tracker import TrackioTracker
from draftworks.training.trackers.wandb_tracker import WandbTracker

CLOSE_S, INTERRUPTED_CLOSE_S = 90.0, 5.0
"""A process that was asked to stop has seconds until it is killed."""


@dataclass(frozen=True)
class TrackedDraft:
    """The draft that is trained, as trackers are told of it.

    Attributes:
        digest: by which people know the draft.
        identity: digest of everything that decides its weights.
        out: folder of the draft.
    """

    target: str
    strategy: str
    digest: str
    identity: str
    parameters: Mapping[str, str | int | float | bool]
    out: Path

    @property
    def name(self) -> str:
        return f"{self.target}/{self.strategy}/{self.digest}"

    def make_run(self, run_id: str) -> TrackedRun:
        tags = {"target": self.target, "strategy": self.strategy, "draft": self.digest}
        return TrackedRun(run_id, self.name, self.parameters, tags, self.out / TRACKERS_FOLDER)


def make_trackers(spec: TrackersSpec, draft: TrackedDraft, warn: Callable[[str], None]) -> list[BackgroundTracker]:
    """Return an observer for each tracker that is on.

    Raises:
        ConfigError: a package or a key is missing.
    """
    require_trackers(spec, "training.trackers")

    def make(kind: str) -> BackgroundTracker:
        return BackgroundTracker(
            kind,
            partial(SentSteps, draft.out / TRACKERS_FOLDER / kind, draft.identity),
            lambda run_id: open_tracker(spec, kind, draft.make_run(run_id)),
            warn,
        )

    return [make(kind) for kind in spec.list_kinds()]


def open_tracker(spec: TrackersSpec, kind: str, run: TrackedRun) -> Tracker:
    """Return the run as it is open in one tracker."""
    if kind == "wandb" and spec.wandb is not None:
        return WandbTracker(spec.wandb, run)
    if kind == "mlflow" and spec.mlflow is not None:
        return MlflowTracker(spec.mlflow, run)
    assert kind == "trackio"
    assert spec.trackio is not None
    return TrackioTracker(spec.trackio, run)


@contextmanager
def report_to(trackers: list[BackgroundTracker]) -> Iterator[None]:
    """Context in which trackers are open; they are told how it ends."""
    for each in trackers:
        each.start()
    outcome, timeout_s = Outcome.FAILED, CLOSE_S
    try:
        yield
        outcome = Outcome.FINISHED
    except Interrupted:
        outcome, timeout_s = Outcome.INTERRUPTED, INTERRUPTED_CLOSE_S
        raise
    finally:
        for each in trackers:
            each.end(outcome)
        deadline = time.monotonic() + timeout_s
        for each in trackers:
            each.wait(max(0.0, deadline - time.monotonic()))
