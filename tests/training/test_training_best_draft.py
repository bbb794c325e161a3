"""The best draft of a training is known at every moment, and is what the training gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from resumable_runs import STEPS, ResumableRun, assert_bit_equal, assert_same_training, changed

from draftworks.drafts.draft_io import read_weights
from draftworks.errors import StoreError
from draftworks.training.checkpoint_manager import BestRecord
from draftworks.training.snapshot import WEIGHTS
from draftworks.training.trainer import Trainer

# A learning rate so large that the best draft is somewhere in the middle.
UNSTEADY = {"best_metric": "eval/avg_loss", "best_mode": "min", "lr": 3.0, "eval_every": 1, "schedule": "constant"}


def best_of(trainer: Trainer) -> int:
    """Step of the best evaluation, told from all of them."""
    return min(trainer.controller.history.evals, key=lambda point: point.result.avg_loss).step


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("save_every", "save_async"), [(0, False), (1, False), (4, True)])
def test_best_has_a_checkpoint_whether_it_is_on_the_save_cadence_or_not(
    tmp_path: Path, save_every: int, save_async: bool
) -> None:
    run = ResumableRun(tmp_path, changed(**UNSTEADY, save_every=save_every, save_async=save_async, keep_checkpoints=1))
    trainer = run.finished()
    best = run.manager().best
    assert best.step == best_of(trainer)
    assert 1 < best.step < STEPS - 1
    assert run.manager().steps() == [best.step, STEPS]
    stopped = ResumableRun(tmp_path / "again", run.spec).trainer(stop_after=best.step)
    stopped.fit()
    assert_bit_equal(read_weights(run.manager().best_dir() / WEIGHTS), stopped.weights())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("publish", ["best", "last"])
def test_training_gives_the_best_or_the_last_draft_as_configured(tmp_path: Path, publish: str) -> None:
    run = ResumableRun(tmp_path, changed(**UNSTEADY, save_every=0, publish=publish))
    trainer = run.finished()
    given = trainer.trained_weights()
    assert given.step == (best_of(trainer) if publish == "best" else STEPS)
    assert_bit_equal(given.tensors, read_weights(run.manager().folder.final(given.step) / WEIGHTS))


@pytest.mark.usefixtures("one_rank")
def test_a_best_that_was_altered_on_the_disk_is_not_given(tmp_path: Path) -> None:
    run = ResumableRun(tmp_path, changed(**UNSTEADY, save_every=0))
    trainer = run.finished()
    weights = run.manager().best_dir() / WEIGHTS
    stored = bytearray(weights.read_bytes())
    stored[-1] ^= 1
    weights.write_bytes(stored)
    with pytest.raises(StoreError, match=f"{weights}: altered"):
        trainer.trained_weights()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("interruptions", [[2], [STEPS - 1], list(range(1, STEPS))])
def test_best_survives_restarts(tmp_path: Path, interruptions: list[int]) -> None:
    spec = changed(**UNSTEADY, save_every=0, keep_checkpoints=1)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "stopped", spec)
    for step in interruptions:
        run.trainer(stop_after=step).fit()
    resumed = run.finished()
    assert resumed.trained_weights().step == best_of(straight) < STEPS
    assert_same_training(resumed, straight)
    assert_bit_equal(resumed.trained_weights().tensors, straight.trained_weights().tensors)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("after", [False, True], ids=["before it is recorded", "after it is recorded"])
@pytest.mark.parametrize("save_every", [0, 1])
def test_best_whose_recording_was_cut_off_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: int, after: bool
) -> None:
    """The process dies between the save on demand and the record that makes it the best, or right after."""
    spec = changed(**UNSTEADY, save_every=save_every, keep_checkpoints=1)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    best = best_of(straight)
    save = BestRecord.save

    def killed(record: BestRecord, *args: object) -> None:
        if record.step < best or after:
            save(record, *args)
        if record.step == best:
            raise KeyboardInterrupt("killed")

    run = ResumableRun(tmp_path / "killed", spec)
    with monkeypatch.context() as patch:
        patch.setattr(BestRecord, "save", killed)
        with pytest.raises(KeyboardInterrupt, match="killed"):
            run.finished()
    assert run.manager().steps()[-1] == best
    assert (run.manager().best.step == best) == after
    resumed = run.finished()
    assert_same_training(resumed, straight)
    assert resumed.trained_weights().step == best


@pytest.mark.usefixtures("one_rank")
def test_a_resume_into_another_folder_takes_the_best_along(tmp_path: Path) -> None:
    spec = changed(**UNSTEADY, save_every=0, keep_checkpoints=1)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    first = ResumableRun(tmp_path / "first", spec)
    first.trainer(stop_after=STEPS - 1).fit()
    assert first.manager().best.step == best_of(straight)
    moved = ResumableRun(tmp_path / "second", spec).trainer(resume_from=first.manager().latest_dir())
    moved.fit()
    assert moved.trained_weights().step == best_of(straight)
    assert_bit_equal(moved.trained_weights().tensors, straight.trained_weights().tensors)


@pytest.mark.usefixtures("one_rank")
def test_a_best_that_a_resume_into_another_folder_begins_with_is_saved_there(tmp_path: Path) -> None:
    """A checkpoint that was copied alone, without the record beside it that says it is the best."""
    spec = changed(**UNSTEADY, save_every=1)
    first = ResumableRun(tmp_path / "first", spec)
    best = best_of(first.finished())
    alone = tmp_path / "copied" / first.manager().best_dir().name
    shutil.copytree(first.manager().best_dir(), alone)
    second = ResumableRun(tmp_path / "second", spec)
    moved = second.trainer(resume_from=alone)
    moved.fit()
    assert second.manager().best.step == moved.trained_weights().step == best
    assert_bit_equal(moved.trained_weights().tensors, read_weights(alone / WEIGHTS))


@pytest.mark.usefixtures("one_rank")
def test_a_resume_from_an_older_checkpoint_forgets_a_later_best(tmp_path: Path) -> None:
    run = ResumableRun(tmp_path, changed(**UNSTEADY, save_every=1, keep_checkpoints=STEPS))
    best = best_of(run.finished())
    trainer = run.trainer(resume_from=run.manager().folder.final(best - 1))
    assert trainer.persistence.manager.best is None or trainer.persistence.manager.best.step < best
