"""DSpark from training to export by the generic programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_run_files import DFLASH_OPTIONS, TRAINING, RunFiles

from draftworks.config.run_files import ExportRun, TargetFiles, TrainRun
from draftworks.programs.evaluate import evaluate
from draftworks.programs.export import export
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.training.history import History

OPTIONS = {**DFLASH_OPTIONS, "markov_rank": 8}
DSPARK = {"strategy": "dspark", "options": OPTIONS, "vocab_mapping": None}


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def test_a_dspark_draft_is_trained_measured_and_exported(files: RunFiles) -> None:
    last = TRAINING.model_copy(update={"publish": "last"})
    trained = train(files.train_run(**DSPARK, training=last), ProgramContext())
    assert trained["last_loss"] < trained["first_loss"]
    report = evaluate(files.evaluate_run(**DSPARK), ProgramContext())["drafts"]
    assert list(report) == ["trained", "untrained"]
    assert report["trained"]["eval/rung3_walk_acc_len"] >= 0
    assert report["trained"]["eval/tau"] > 0
    (files.folder / "exported").mkdir()
    run = ExportRun(out=files.folder / "exported", target=files.target, draft=files.folder / "draft")
    formats = export(run, ProgramContext())["formats"]
    assert set(formats) == {"zlab_dspark", "speculators_dspark"}
    assert all(exported["passed"] for exported in formats.values())


def test_what_rejection_sampling_would_accept_is_kept_with_the_curve(files: RunFiles) -> None:
    run: TrainRun = files.train_run(**DSPARK)
    train(run, ProgramContext())
    metric_sums = History.load(run.out / "history.json").evals[-1].result.metric_sums
    blocks = metric_sums["tau_denoms"][0]
    assert blocks > 0
    assert 0 < metric_sums["tau_sums"][0] < 3 * blocks
    assert 0 <= metric_sums["accept_len_sums"][0] <= 3 * blocks
    assert len(metric_sums["acceptance_sums"]) == len(metric_sums["confidence_error_sums"]) == 3
