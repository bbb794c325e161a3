"""The best evaluation is remembered beside its checkpoint, and what cannot be trusted is ignored, saying why."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_toys import METRIC, contents, save_best, save_steps
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError
from draftworks.evaluation.result import WALK_METRIC
from draftworks.training.checkpoint_manager import BestRecord, BestRule, CheckpointManager

FINITE = st.floats(-1e6, 1e6)
LOSS = "eval/avg_loss"


def record_of(score: float, metric: str = METRIC) -> BestRecord:
    return BestRecord("run", 1, "run-step1", score, metric, {metric: score})


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@given(score=FINITE, best=FINITE, min_delta=st.floats(0, 10), smaller=st.booleans())
def test_better_means_by_more_than_min_delta(score: float, best: float, min_delta: float, smaller: bool):
    gain = best - score if smaller else score - best
    assert BestRule(METRIC, smaller, min_delta).is_better({METRIC: score}, record_of(best)) == (gain > min_delta)


@given(score=FINITE, smaller=st.booleans())
def test_the_first_evaluation_is_better_than_none(score: float, smaller: bool):
    assert BestRule(METRIC, smaller, min_delta=1e9).is_better({METRIC: score}, None)


@pytest.mark.parametrize("best", [None, record_of(0.0)])
@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize("metrics", [{}, {METRIC: math.nan}, {METRIC: math.inf}, {METRIC: -math.inf}])
def test_an_evaluation_of_nothing_or_without_a_finite_score_never_wins(metrics, smaller: bool, best):
    assert not BestRule(METRIC, smaller).is_better(metrics, best)


@pytest.mark.parametrize("value", [{}, {METRIC: None}, {METRIC: "0.5"}, {METRIC: [0.5]}])
def test_a_metric_that_is_not_there_is_named_beside_those_that_are(value: dict[str, Any]):
    metrics = {"eval/avg_acc": 0.5, LOSS: 2, "eval/per_position_acc": [0.5], **value}
    with pytest.raises(
        ConfigError, match=rf"best_metric: no evaluation has '{METRIC}' as a number; did you mean {WALK_METRIC}"
    ):
        BestRule().is_better(metrics, None)


def test_the_best_survives_a_restart(tmp_path: Path):
    manager = CheckpointManager(tmp_path, "run")
    save_best(manager, 1, 0.5)
    save_steps(manager, 2)
    again = CheckpointManager(tmp_path, "run")
    assert again.best == manager.best == record_of(0.5)
    assert [again.is_better({METRIC: score}) for score in (0.4, 0.5, 0.6)] == [False, False, True]


def test_a_smaller_loss_is_better_after_a_restart_too(tmp_path: Path):
    rule = BestRule(LOSS, smaller=True, min_delta=0.1)
    manager = CheckpointManager(tmp_path, "run", rule=rule)
    save_steps(manager, 1)
    manager.update_best(1, {LOSS: 2.0, METRIC: 0.5})
    again = CheckpointManager(tmp_path, "run", rule=rule)
    assert [again.is_better({LOSS: loss}) for loss in (1.8, 1.95, 2.0, 3.0)] == [True, False, False, False]


def test_a_best_is_recorded_as_it_is_told_to_be(tmp_path: Path):
    manager = CheckpointManager(tmp_path, "run")
    save_best(manager, 1, 0.5)
    save_best(manager, 2, 0.4)
    assert manager.best_dir() == CheckpointManager(tmp_path, "run").best_dir() == manager.folder.final(2)
    with pytest.raises(ValueError, match="an empty evaluation cannot be the best"):
        manager.update_best(2, {})


def changed(**values: Any) -> Callable[[Path], object]:
    """The record of the best says something else."""

    def change(folder: Path) -> None:
        pointer = folder / "run-best.json"
        pointer.write_text(json.dumps(json.loads(pointer.read_text()) | values))

    return change


def written(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "run-best.json").write_bytes(data)


UNTRUSTED = {
    "empty": written(b""),
    "cut off": written(b'{"run_id": "run", "st'),
    "not text": written(b"\xff\xfe"),
    "no record": written(b"[1]"),
    "lacking fields": written(b'{"run_id": "run"}'),
    "unknown field": changed(more=1),
    "of another run": changed(run_id="other"),
    "naming another checkpoint": changed(checkpoint="../run-step1"),
    "of another step": changed(step=2),
    "a step that is text": changed(step="1"),
    "a score that is text": changed(score="high"),
    "no score": changed(score=None),
    "not finite": changed(score=math.nan),
    "of another metric": changed(metric=LOSS),
    "of a checkpoint that is gone": lambda folder: (folder / "run-step1" / "checkpoint.json").unlink(),
    "of a truncated checkpoint": lambda folder: (folder / "run-step1" / "model.safetensors").write_bytes(b"half"),
}


@pytest.mark.parametrize("change", UNTRUSTED.values(), ids=UNTRUSTED)
def test_a_record_that_cannot_be_trusted_is_ignored_with_one_warning(tmp_path: Path, caplog, change):
    save_best(CheckpointManager(tmp_path, "run"), 1, 0.9)
    change(tmp_path)
    before = contents(tmp_path)
    manager = CheckpointManager(tmp_path, "run")
    assert (manager.best, manager.best_dir()) == (None, None)
    assert len(warnings_of(caplog)) == 1
    assert warnings_of(caplog)[0].startswith(f"{tmp_path / 'run-best.json'}: ignored: ")
    assert contents(tmp_path) == before
    assert manager.is_better({METRIC: 0.1})
    save_best(manager, 3, 0.1)
    assert CheckpointManager(tmp_path, "run").best_dir() == manager.folder.final(3)


def test_a_run_without_a_best_warns_of_nothing(tmp_path: Path, caplog):
    save_steps(CheckpointManager(tmp_path, "run"), 1)
    assert CheckpointManager(tmp_path, "run").best is None
    assert warnings_of(caplog) == []
