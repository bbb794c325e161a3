"""An interrupted training that goes on ends as if nothing had happened, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from resumable_runs import (
    GLOBAL,
    STEPS,
    STEPS_PER_EPOCH,
    ResumableRun,
    assert_bit_equal,
    assert_same_training,
    changed,
)
from test_training_eagle3 import SPEC as EAGLE3_SPEC
from test_training_eagle3 import eagle3, ragged
from training_toys import CountingStore

from draftworks.errors import StoreError

MIDDLE, EPOCH_BORDER = 7, STEPS_PER_EPOCH


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("save_every", "stop_after"), [(0, 1), (4, EPOCH_BORDER), (3, 6), (2, MIDDLE), (2, STEPS - 1), (0, STEPS)]
)
def test_stopped_and_resumed_equals_undisturbed(tmp_path: Path, save_every: int, stop_after: int) -> None:
    spec = changed(save_every=save_every)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "stopped", spec)
    stopped = run.trainer(stop_after=stop_after)
    stopped.fit()
    assert stopped.controller.stopped_by
    assert stopped.controller.global_step == stop_after
    assert run.manager().steps()[-1] == stop_after
    resumed = run.finished()
    assert_same_training(resumed, straight)
    assert [session.start_step for session in resumed.controller.history.sessions] == [0, stop_after]


@pytest.mark.usefixtures("one_rank")
def test_stopped_after_every_step_equals_undisturbed(tmp_path: Path) -> None:
    straight = ResumableRun(tmp_path / "straight").finished()
    run = ResumableRun(tmp_path / "stopped")
    for step in range(1, STEPS):
        run.trainer(stop_after=step).fit()
    assert_same_training(run.finished(), straight)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("save_every", "step", "save_async"),
    [(4, 0, False), (3, EPOCH_BORDER, False), (4, MIDDLE, False), (2, STEPS - 1, False), (1, 1, True), (2, 9, True)],
)
def test_broken_within_a_window_and_resumed_equals_undisturbed(
    tmp_path: Path, save_every: int, step: int, save_async: bool
) -> None:
    spec = changed(save_every=save_every, save_async=save_async)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "broken", spec)
    within = step * GLOBAL + run.micro + 1
    broken = run.trainer(store=CountingStore(run.train, limit=within))
    with pytest.raises(StoreError, match=f"broke down after {within} samples"):
        broken.fit()
    assert broken.controller.global_step == step
    broken.persistence.manager.wait()  # as the end of its process does
    assert_same_training(run.finished(), straight)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("limit", [0, 10])
def test_evaluation_that_was_cut_off_is_made_up_for(tmp_path: Path, limit: int) -> None:
    spec = changed(save_every=3)
    straight = ResumableRun(tmp_path / "straight", spec).finished()
    run = ResumableRun(tmp_path / "cut", spec)
    with pytest.raises(StoreError, match="broke down"):
        run.trainer(held_out_store=CountingStore(run.held_out, limit=limit)).fit()
    assert_same_training(run.finished(), straight)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stop_after", [3, EPOCH_BORDER, STEPS])
def test_resume_reads_no_feature_of_what_is_done(tmp_path: Path, stop_after: int) -> None:
    run = ResumableRun(tmp_path)
    run.trainer(stop_after=stop_after).fit()
    store = CountingStore(run.train)
    run.trainer(store=store).fit()
    assert store.reads == (STEPS - stop_after) * GLOBAL


@pytest.mark.usefixtures("one_rank")
def test_resume_of_a_finished_training_changes_nothing(tmp_path: Path) -> None:
    run = ResumableRun(tmp_path)
    finished = run.finished()
    store = CountingStore(run.train)
    for _ in range(2):
        again = run.trainer(store=store)
        again.fit()
        assert_same_training(again, finished)
    assert store.reads == 0


@pytest.mark.usefixtures("one_rank")
def test_resume_from_an_older_checkpoint_takes_the_same_course(tmp_path: Path) -> None:
    run = ResumableRun(tmp_path, changed(save_every=4, keep_checkpoints=9))
    straight = run.finished()
    earlier = run.trainer(resume_from=run.manager().folder.final(8))
    assert earlier.controller.global_step == 8
    earlier.fit()
    assert_same_training(earlier, straight)


@pytest.mark.usefixtures("one_rank")
def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    run = ResumableRun(tmp_path)
    torch.manual_seed(11)
    run.trainer(stop_after=MIDDLE).fit()
    expected = torch.rand(5)
    torch.manual_seed(12)
    run.trainer()
    assert torch.equal(torch.rand(5), expected)


def _eagle3_in_two_parts(rank: int, folder: Path) -> None:
    spec = changed(EAGLE3_SPEC, schedule="wsd", decay_ratio=0.5, epochs=3)
    parts = {"micro": 2, "strategy": eagle3, "train": ragged(19, seed=1), "held_out": ragged(5, seed=2)}
    straight = ResumableRun(folder / "straight", spec, **parts).finished(rank, world=2)
    run = ResumableRun(folder / "stopped", spec, **parts)
    run.trainer(rank, 2, stop_after=3).fit()
    resumed = run.finished(rank, world=2)
    assert_same_training(resumed, straight)
    assert_bit_equal(resumed.trained_weights().tensors, straight.trained_weights().tensors)
    rates = [point.lr for point in resumed.controller.history.train]
    assert rates[0] == max(rates) > rates[-1]


def test_eagle3_on_two_ranks_with_wsd_in_two_parts_equals_undisturbed(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _eagle3_in_two_parts, tmp_path)
