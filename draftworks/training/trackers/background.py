"""An observer that reports to a tracker from a thread of its own, so that a slow or broken tracker stops no training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from draftworks.storage.masking import mask_secrets
from draftworks.training.history import EvalPoint, TrainPoint
from draftworks.training.scalars import list_eval_scalars, list_train_scalars
from draftworks.training.trackers.sent_steps import SentSteps
from draftworks.training.trackers.tracker import Outcome, Tracker

TRAIN, EVAL = "train", "eval"
MAX_PROBLEM = 500
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "TRACKIO_WRITE_TOKEN")
"""Environment variables that the libraries read; their values are shown in no warning."""


@dataclass(frozen=True)
class _Figures:
    """Figures of one step, for one series."""

    series: str
    step: int
    values: Mapping[str, float]


class BackgroundTracker:
    """A `TrainingObserver` that hands figures to a tracker. The first error of the tracker is its last: a warning.

    Args:
        kind: name of the tracker, for warnings.
        sent: what the tracker was told before.
        open_tracker: called in the thread with the run's id; it may be slow, and may fail.
        warn: called from the caller's thread only.
    """

    def __init__(
        self,
        kind: str,
        sent: Callable[[], SentSteps],
        open_tracker: Callable[[str], Tracker],
        warn: Callable[[str], None],
    ) -> None:
        self._kind = kind
        self._make_sent = sent
        self._open = open_tracker
        self._warn = warn
        self._queue: SimpleQueue[_Figures | Outcome] = SimpleQueue()
        self._problem: str | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {kind}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_train(self, point: TrainPoint, total_steps: int) -> None:
        self._put(_Figures(TRAIN, point.step, list_train_scalars(point)))

    def on_eval(self, point: EvalPoint) -> None:
        self._put(_Figures(EVAL, point.step, list_eval_scalars(point)))

    def end(self, outcome: Outcome) -> None:
        """Let the tracker end after everything that it was given."""
        self._put(outcome)

    def wait(self, timeout_s: float) -> None:
        """Wait for that, at most `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"not done within {timeout_s:.0f} s: its last points may be missing"
        self._warn_once()

    def _put(self, item: _Figures | Outcome) -> None:
        if self._problem is None:
            self._queue.put(item)
        self._warn_once()

    def _warn_once(self) -> None:
        if self._problem is not None and not self._warned:
            self._warned = True
            self._warn(f"warning: tracker {self._kind}: {self._problem}. The training goes on without it")

    def _run(self) -> None:
        try:
            sent = self._make_sent()
            tracker = self._open(sent.run_id)
            while not isinstance(item := self._queue.get(), Outcome):
                if sent.claim(item.series, item.step):
                    tracker.log(item.step, item.values)
            tracker.close(item)
        except (Exception, SystemExit) as error:
            self._problem = describe_problem(error, os.environ)


def describe_problem(error: BaseException, environment: Mapping[str, str]) -> str:
    """Return an error in words, without the value of any key, token or password of the environment."""
    return mask_secrets(f"{type(error).__name__}: {error}", environment, SECRETS)[:MAX_PROBLEM]
