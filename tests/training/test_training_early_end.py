"""Training ends when evaluations have not been better for too long, and stays ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from resumable_runs import STEPS, ResumableRun, assert_same_training, changed
from training_toys import CountingStore

from draftworks.config.registry_files import TrainingSpec
from draftworks.errors import StoreError
from draftworks.training.trainer import Trainer

# The loss falls from one evaluation to the next, but after a while by less than this.
STALLING = {"best_metric": "eval/avg_loss", "best_mode": "min", "best_min_delta": 0.06, "eval_every": 1, "lr": 0.02}


def expected_end(undisturbed: Trainer, spec: TrainingSpec) -> int:
    """The step after which a training ends, told from all evaluations of one without patience."""
    best, worse = float("inf"), 0
    for point in undisturbed.controller.history.evals:
        better = best - point.result.avg_loss > spec.best_min_delta
        best, worse = (point.result.avg_loss, 0) if better else (best, worse + 1)
        if worse == spec.patience:
            return point.step
    return STEPS


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_ends_training_at_the_first_evaluation_that_exhausts_it(tmp_path: Path, patience: int) -> None:
    spec = changed(**STALLING, patience=patience)
    whole = ResumableRun(tmp_path / "whole", changed(**STALLING)).finished()
    early = ResumableRun(tmp_path / "early", spec).finished()
    end = expected_end(whole, spec)
    assert patience + 1 < end < STEPS
    assert early.controller.global_step == early.controller.history.steps == end
    assert early.controller.ended_early
    assert not whole.controller.ended_early
    assert early.persistence.manager.best.step < end


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("save_every", [0, 4, 3], ids=["never", "off the cadence", "on the cadence"])
def test_resume_of_a_training_that_ended_early_trains_nothing(tmp_path: Path, save_every: int) -> None:
    """It ends after step 6: the first evaluation is the best, since no other can be so much better."""
    spec = changed(eval_every=2, best_min_delta=100.0, patience=2, save_every=save_every)
    run = ResumableRun(tmp_path, spec)
    ended = run.finished()
    assert (ended.controller.history.steps, run.manager().steps()[-1]) == (6, 6)
    for _ in range(2):
        store = CountingStore(run.train)
        again = run.trainer(store=store)
        again.fit()
        assert store.reads == 0
        assert again.controller.ended_early
        assert_same_training(again, ended)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stop_after", [1, 3, 4, 5])
def test_patience_counts_on_over_an_interruption(tmp_path: Path, stop_after: int) -> None:
    spec = changed(eval_every=2, best_min_delta=100.0, patience=2, save_every=0)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "stopped", spec)
    run.trainer(stop_after=stop_after).fit()
    assert_same_training(run.finished(), straight)


@pytest.mark.usefixtures("one_rank")
def test_end_that_an_evaluation_was_cut_off_from_is_found_on_resume(tmp_path: Path) -> None:
    spec = changed(eval_every=2, best_min_delta=100.0, patience=2, save_every=3)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "cut", spec)
    within_the_third = 2 * len(run.held_out) + 3
    with pytest.raises(StoreError, match="broke down"):
        run.trainer(held_out_store=CountingStore(run.held_out, limit=within_the_third)).fit()
    assert_same_training(run.finished(), straight)


def test_patience_without_evaluations_is_refused() -> None:
    with pytest.raises(ValidationError, match="patience 3 counts evaluations, but eval_every is 0"):
        TrainingSpec(patience=3)
