"""Who hears of the training, and the pictures of it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image
from strategy_cases import make
from tracker_toys import RESULT, make_point

from draftworks.errors import ConfigError, StoreError
from draftworks.training.history import (
    EvalPoint,
    History,
    ProgressReport,
    TensorBoardLog,
    draw_training_figure,
    estimate_remaining_s,
    render_training_plot,
)


@pytest.fixture
def history() -> History:
    points = [make_point(step, loss) for step, loss in ((1, 4.0), (2, None), (3, 2.0), (4, 1.0))]
    return History(8, points, [EvalPoint(4, 8.0, RESULT)])


def test_progress_has_loss_speed_and_time_left() -> None:
    told = []
    report = ProgressReport(lambda values, *, force=False: told.append(values))
    report.on_train(make_point(4, 1.0), total_steps=8)
    report.on_eval(EvalPoint(4, 8.0, RESULT))
    assert told[0]["step"] == "4/8"
    assert (told[0]["loss"], told[0]["tokens/s"], told[0]["eta_s"]) == (1.0, 50, 8)
    assert told[1]["heldout_loss"] == 2.0


def test_evaluations_and_the_last_step_force_their_way() -> None:
    forced = []
    report = ProgressReport(lambda values, *, force=False: forced.append(force))
    report.on_train(make_point(7, 1.0), total_steps=8)
    report.on_eval(EvalPoint(7, 8.0, RESULT))
    report.on_train(make_point(8, 1.0), total_steps=8)
    assert forced == [False, True, True]


def test_time_left_is_zero_at_the_end() -> None:
    assert estimate_remaining_s(make_point(8, 1.0), share_done=1.0) == 0.0


def test_time_left_knows_that_later_steps_unroll_further() -> None:
    """By the mean of the steps so far it would be 8 s: those that are left take two and a half times as long each."""
    told = []
    strategy = make("eagle3", short_unroll=0.5, ttt_length=5)
    report = ProgressReport(
        lambda values, *, force=False: told.append(values), find_share_done=strategy.find_share_done
    )
    report.on_train(make_point(4, 1.0), total_steps=8)
    assert told[0]["eta_s"] == 20
    assert [strategy.find_share_done(step, 8) for step in (0, 8)] == [0, 1]


def test_smoothed_losses_leave_out_points_without_loss(history: History) -> None:
    assert history.first_loss(share=0.34) == 4.0
    assert history.last_loss(share=0.67) == 1.5
    assert (history.steps, history.tokens) == (4, 400)


def test_losses_of_nothing_are_none() -> None:
    empty = History(3)
    unsupervised = History(3, [make_point(1, None), make_point(3, None)])
    for history in (empty, unsupervised):
        assert history.first_loss() is None
        assert history.last_loss() is None
    assert empty.tokens_per_s == 0.0


def test_first_and_last_loss_differ_from_two_points_on() -> None:
    history = History(3, [make_point(1, 4.0)])
    assert (history.first_loss(), history.last_loss()) == (4.0, 4.0)
    history.train.append(make_point(3, 2.0))
    assert (history.first_loss(), history.last_loss()) == (4.0, 2.0)


def test_plot_claims_no_unit_for_a_loss_only_the_strategy_knows(history: History) -> None:
    labels = [axes.get_ylabel() for axes in draw_training_figure(history, "").axes]
    assert labels == ["loss (training objective)", "acceptance length τ, simulated (rung 1)"]


@pytest.mark.usefixtures("pictures")
def test_history_without_evaluation_is_drawn(history: History) -> None:
    for drawn in (history, History(8, history.train), History(8)):
        with Image.open(io.BytesIO(render_training_plot(drawn, "eagle3 draft of tiny"))) as picture:
            picture.verify()
            assert picture.format == "PNG"


@pytest.mark.parametrize("content", ["{", "{}", '{"schema_version": 7}'])
def test_damaged_history_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(content)
    with pytest.raises(StoreError, match=r"history\.json"):
        History.load(path)


def test_missing_tensorboard_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"TensorBoard is not installed: pip install -e '\.\[tensorboard\]'"):
        TensorBoardLog(tmp_path)


def test_tensorboard_gets_every_point(history: History, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = TensorBoardLog(tmp_path)
    for each in history.train:
        log.on_train(each, history.total_steps)
    log.on_eval(history.evals[0])
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (3, 2.0), (4, 1.0)]
    assert events.Scalars("eval/simulated_acc_len")[0].value == pytest.approx(RESULT.simulated_acc_len)


def test_tensorboard_shows_each_step_once_after_an_interruption(history: History, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for begin in (0, 1):  # killed after the last point, gone on with from the second
        log = TensorBoardLog(tmp_path)
        for each in history.train[begin:]:
            log.on_train(each, history.total_steps)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 3, 4]
