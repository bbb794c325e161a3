"""The best evaluation is remembered beside its checkpoint, and what cannot be trusted is ignored, saying why.
The best draft of a training is known at every moment, and is what the training gives.
The walk decides which checkpoint is the best, on any number of ranks.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import METRIC, contents, save_best, save_steps
from gloo_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from resumable_runs import STEPS, ResumableRun, assert_bit_equal, assert_same_training, changed
from test_training_eagle3 import GLOBAL, SPEC, eagle3, ragged
from training_toys import eval_loader, train_loader

from draftworks.drafts.draft_io import read_weights
from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.ladder.replay import replay
from draftworks.evaluation.result import BLOCK_METRIC, WALK_METRIC
from draftworks.training.checkpoint_manager import BestRecord, BestRule, CheckpointManager
from draftworks.training.snapshot import WEIGHTS
from draftworks.training.trainer import Persistence, Trainer

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


def changed_record(**values: Any) -> Callable[[Path], object]:
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
    "unknown field": changed_record(more=1),
    "of another run": changed_record(run_id="other"),
    "naming another checkpoint": changed_record(checkpoint="../run-step1"),
    "of another step": changed_record(step=2),
    "a step that is text": changed_record(step="1"),
    "a score that is text": changed_record(score="high"),
    "no score": changed_record(score=None),
    "not finite": changed_record(score=math.nan),
    "of another metric": changed_record(metric=LOSS),
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


WALKED = SPEC.model_copy(update={"best_metric": WALK_METRIC})


def trained(folder: Path, rank: int = 0, world: int = 1) -> Trainer:
    strategy = eagle3()
    manager = CheckpointManager(folder, "walk", rule=BestRule(WALK_METRIC))
    trainer = Trainer(
        strategy,
        train_loader(strategy, ragged(19, seed=1), 2, GLOBAL, rank, world),
        eval_loader(strategy, ragged(5, seed=2), 2, rank, world),
        WALKED,
        torch.device("cpu"),
        persistence=Persistence(manager),
    )
    assert trainer.can_evaluate()
    trainer.fit()
    return trainer


def walks(trainer: Trainer) -> list[list[float]]:
    points = (point.result.metrics() for point in trainer.controller.history.evals)
    return [[metrics[WALK_METRIC], metrics[BLOCK_METRIC]] for metrics in points]


@pytest.mark.usefixtures("one_rank")
def test_the_best_checkpoint_is_the_one_with_the_longest_walk(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    best = trainer.persistence.manager.best
    assert best.metric == WALK_METRIC
    assert best.score == max(walk for walk, _ in walks(trainer))


@pytest.mark.usefixtures("one_rank")
def test_an_evaluation_in_training_counts_as_a_replay_afterwards(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    strategy = trainer.strategy
    prompts = [r.walk for batch in eval_loader(strategy, ragged(5, seed=2), 3) for r in replay(strategy, batch, 3)]
    expected = sum(p.accepted for p in prompts) / sum(p.passes for p in prompts)
    assert walks(trainer)[-1][0] == expected


def _train_and_tell(rank: int, folder: Path) -> None:
    found = walks(trained(folder / "two", rank, 2))
    if rank == 0:
        (folder / "walks.json").write_text(json.dumps(found))


def test_two_ranks_walk_as_one_does(tmp_path: Path, one_rank: None) -> None:
    on_ranks(2, tmp_path, _train_and_tell, tmp_path)
    assert json.loads((tmp_path / "walks.json").read_text()) == walks(trained(tmp_path / "one"))
