"""Domino from training to export by the generic programs; its schedule continues when a training resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_run_files import DFLASH_OPTIONS, TRAINING, RunFiles

from draftworks.config.run_files import ExportRun, TargetFiles, TrainRun
from draftworks.programs.evaluate import evaluate
from draftworks.programs.export import export
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.training.checkpoint_files import CheckpointFolder
from draftworks.training.history import History

OPTIONS = {**DFLASH_OPTIONS, "emb_dim": 8, "gru_hidden_dim": 12}
DOMINO = {"strategy": "domino", "options": OPTIONS, "vocab_mapping": None}


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def training(**changes: Any) -> dict[str, Any]:
    return {"training": TRAINING.model_copy(update={"publish": "last", **changes})}


def test_a_domino_draft_is_trained_measured_and_exported(files: RunFiles) -> None:
    trained = train(files.train_run(**DOMINO), ProgramContext())
    assert trained["last_loss"] < trained["first_loss"]
    report = evaluate(files.evaluate_run(**DOMINO), ProgramContext())["drafts"]
    assert list(report) == ["trained", "untrained"]
    assert report["trained"]["eval/simulated_acc_len"] >= 0
    assert report["trained"]["eval/rung3_walk_acc_len"] >= 0
    (files.folder / "exported").mkdir()
    run = ExportRun(out=files.folder / "exported", target=files.target, draft=files.folder / "draft")
    [exported] = export(run, ProgramContext())["formats"].values()
    assert exported["passed"]
    assert "DFLASH" in exported["commands"]["SGLang"]


def test_a_training_cut_in_the_middle_of_its_schedule_ends_with_the_same_weights(files: RunFiles) -> None:
    """λ falls over the first four of eight steps; the second training begins where the first saved step 3."""
    whole = files.train_run(**DOMINO, **training(save_every=3, keep_checkpoints=9))
    done = train(whole, ProgramContext())
    after_three = CheckpointFolder(whole.checkpoints, whole.run_id).final(3)
    rest = files.train_run(
        out=files.folder / "rest", resume_from=after_three, **DOMINO, **training(save_every=3, keep_checkpoints=9)
    )
    again = train(rest, ProgramContext())
    assert [session["from_step"] for session in again["sessions"]] == [0, 3]
    assert again["weights_digest"] == done["weights_digest"]


def test_counts_of_the_prefixes_are_kept_with_the_curve(files: RunFiles) -> None:
    run: TrainRun = files.train_run(**DOMINO)
    train(run, ProgramContext())
    metric_sums = History.load(run.out / "history.json").evals[-1].result.metric_sums
    for name in ("accept_len", "base_accept_len"):
        assert 0 <= sum(metric_sums[f"{name}_sums"]) <= 3 * sum(metric_sums[f"{name}_denoms"])
    assert sum(metric_sums["accept_len_denoms"]) > 0
    assert len(metric_sums["base_acc_corrects"]) == len(metric_sums["acc_corrects"]) == 3
