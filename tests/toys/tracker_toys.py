"""A training as trackers see it, and a tracker that keeps what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftworks.config.trackers import TrackersSpec
from draftworks.evaluation.result import EvalResult
from draftworks.training.history import EvalPoint, TrainPoint
from draftworks.training.tracking import Outcome, TrackedDraft, TrackedRun, make_trackers, report_to

RESULT = EvalResult(20.0, 10.0, 30, {"acc_corrects": (5.0, 2.0), "acc_denoms": (10.0, 8.0)})
TOTAL = 40


def make_point(step: int, loss: float | None = 1.0) -> TrainPoint:
    return TrainPoint(
        step=step,
        epoch=step / 10,
        loss=loss,
        accuracy=0.5,
        simulated_acc_len=0.6,
        lr=1e-3,
        grad_norm=0.4,
        tokens=100,
        tokens_per_s=50.0,
        seconds=2.0 * step,
    )


def make_draft(out: Path) -> TrackedDraft:
    parameters = {"training.lr": 1e-3, "strategy": "eagle3", "options.layers": "1,2"}
    return TrackedDraft("tiny", "eagle3", "722c2df91289f306", "0123456789abcdef", parameters, out)


def report_session(spec: TrackersSpec, out: Path, begin: int, end: int, every: int = 10) -> list[str]:
    """Report the steps of one session of a training, with an evaluation after each; return the warnings."""
    warnings: list[str] = []
    trackers = make_trackers(spec, make_draft(out), warnings.append)
    with report_to(trackers):
        for step in range(begin, end + 1, every):
            for each in trackers:
                each.on_train(make_point(step, loss=float(step)), TOTAL)
                each.on_eval(EvalPoint(step, 1.0, RESULT))
    return warnings


def report_two_sessions(values: dict, out: Path) -> None:
    """Report a training that was ended after step 21 and goes on from step 1."""
    spec = TrackersSpec.model_validate(values)
    assert report_session(spec, out, 1, 21) == []
    assert report_session(spec, out, 1, 31) == []


@dataclass
class MemoryTracker:
    """Keeps what it is told; raises at the figure of number `breaks_at`."""

    run: TrackedRun
    told: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    breaks_at: int | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if len(self.told) == self.breaks_at:
            raise ConnectionError("the server went away")
        self.told.append((step, dict(values)))

    def close(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
