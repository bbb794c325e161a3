"""Trackers in general: what they are told, once, and that none of them stops a training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tracker_toys import RESULT, MemoryTracker, make_draft, make_point
from waiting import HANG_S

from draftworks.config.trackers import TrackersSpec
from draftworks.distributed.stop_signals import Interrupted
from draftworks.errors import ConfigError
from draftworks.training.history import EvalPoint, list_eval_scalars, list_train_scalars
from draftworks.training.tracking import (
    BackgroundTracker,
    Outcome,
    SentSteps,
    describe_problem,
    flatten_parameters,
    make_trackers,
    report_to,
)


class Session:
    """One session of a training with one tracker in memory."""

    def __init__(self, out: Path, breaks_at: int | None = None) -> None:
        self.warnings: list[str] = []
        self.opened: list[MemoryTracker] = []

        def open_tracker(run_id: str) -> MemoryTracker:
            self.opened.append(MemoryTracker(make_draft(out).make_run(run_id), breaks_at=breaks_at))
            return self.opened[-1]

        self.observer = BackgroundTracker("memory", lambda: SentSteps(out, "abc"), open_tracker, self.warnings.append)

    def report(self, *steps: int) -> MemoryTracker:
        with report_to([self.observer]):
            for step in steps:
                self.observer.on_train(make_point(step), 40)
                self.observer.on_eval(EvalPoint(step, 1.0, RESULT))
        return self.opened[0]


def report_until(error: BaseException, observers: list[BackgroundTracker]) -> None:
    with report_to(observers):
        for each in observers:
            each.on_train(make_point(1), 40)
        raise error


def test_every_point_is_told_with_the_names_of_tensorboard(tmp_path: Path) -> None:
    tracker = Session(tmp_path).report(1, 10)
    evaluated = list_eval_scalars(EvalPoint(1, 1.0, RESULT))
    assert tracker.told == [
        (step, values) for step in (1, 10) for values in (list_train_scalars(make_point(step)), evaluated)
    ]
    assert evaluated["eval/per_position_acc/1"] == 0.25
    assert tracker.outcomes == [Outcome.FINISHED]


def test_a_restart_goes_on_in_the_same_run_and_repeats_no_step(tmp_path: Path) -> None:
    first = Session(tmp_path).report(1, 10, 20)
    second = Session(tmp_path).report(10, 20, 30)
    assert first.run.id == second.run.id
    assert first.run.id.startswith("abc-")
    assert [step for step, _ in second.told] == [30, 30]


def test_a_training_that_starts_over_is_another_run(tmp_path: Path) -> None:
    one, other = (Session(tmp_path / name).report(1) for name in ("one", "other"))
    assert one.run.id != other.run.id


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"id": 1}', '{"id": "a", "steps": 3}', '{"id": "a", "steps": {"train": "x"}}']
)
def test_a_damaged_record_of_steps_begins_another_run(content: str, tmp_path: Path) -> None:
    (tmp_path / "sent.json").write_text(content)
    assert SentSteps(tmp_path, "abc").run_id.startswith("abc-")


def test_a_tracker_that_fails_is_one_warning_and_the_training_goes_on(tmp_path: Path) -> None:
    session = Session(tmp_path, breaks_at=1)
    tracker = session.report(1, 10, 20)
    assert len(tracker.told) == 1
    assert len(session.warnings) == 1
    assert "memory: ConnectionError: the server went away" in session.warnings[0]


def test_a_tracker_that_cannot_be_opened_is_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []

    def refuse(run_id: str) -> MemoryTracker:
        raise SystemExit("no such project")

    observer = BackgroundTracker("memory", lambda: SentSteps(tmp_path, "abc"), refuse, warnings.append)
    with report_to([observer]):
        observer.on_train(make_point(1), 40)
    assert ["no such project" in line for line in warnings] == [True]


def test_a_tracker_that_hangs_holds_up_neither_steps_nor_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftworks.training.tracking.INTERRUPTED_CLOSE_S", 0.05)
    warnings: list[str] = []
    released = threading.Event()

    def hang(run_id: str) -> MemoryTracker:
        released.wait(HANG_S)
        return MemoryTracker(make_draft(tmp_path).make_run(run_id))

    folders = [tmp_path / str(number) for number in range(3)]  # each tracker has one of its own
    observers = [
        BackgroundTracker("slow", lambda folder=folder: SentSteps(folder, "abc"), hang, warnings.append)
        for folder in folders
    ]
    with pytest.raises(Interrupted):
        report_until(Interrupted(15), observers)
    released.set()
    assert len(warnings) == 3
    assert "its last points may be missing" in warnings[0]


def test_outcomes_are_told_apart(tmp_path: Path) -> None:
    for error, outcome in ((Interrupted(15), Outcome.INTERRUPTED), (ValueError("bad"), Outcome.FAILED)):
        session = Session(tmp_path / outcome)
        with pytest.raises(type(error)):
            report_until(error, [session.observer])
        assert session.opened[0].outcomes == [outcome]


def test_no_secret_is_in_a_warning() -> None:
    environment = {"WANDB_API_KEY": "key-123", "MLFLOW_TRACKING_PASSWORD": ""}
    assert describe_problem(OSError("401 for key-123: denied"), environment) == "OSError: 401 for ***: denied"
    assert "hunter2" not in describe_problem(OSError("no answer of http://me:hunter2@host"), {})
    assert describe_problem(OSError("401 for ab"), {"HF_TOKEN": "ab\n"}) == "OSError: 401 for ***"


def test_parameters_are_flat() -> None:
    nested = {"training": {"lr": 0.1, "seed": None}, "taps": [1, 2], "on": True, "none": None}
    assert flatten_parameters(nested) == {"training.lr": 0.1, "taps": "1,2", "on": True}


def test_no_tracker_is_the_default_and_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_trackers(TrackersSpec(), make_draft(tmp_path), print) == []
    monkeypatch.setattr("draftworks.config.trackers.find_spec", lambda name: None)
    spec = TrackersSpec.model_validate({"wandb": {}, "mlflow": {"uri": "http://localhost:5000"}})
    with pytest.raises(ConfigError, match=r"wandb, mlflow are not installed: pip install -e '\.\[wandb,mlflow\]'"):
        make_trackers(spec, make_draft(tmp_path), print)
