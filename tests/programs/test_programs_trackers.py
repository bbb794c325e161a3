"""A training program with a real tracker: what it is told, and that the draft is the same."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from draft_run_files import TRAINING, RunFiles

from draftworks.config.run_files import TargetFiles
from draftworks.config.trackers import TrackersSpec
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

pytestmark = pytest.mark.trackers


def test_a_resumed_training_is_one_run_and_the_same_draft(tmp_path: Path, tiny_target: TargetFiles) -> None:
    files = RunFiles.make(tmp_path, tiny_target)
    trackers = TrackersSpec.model_validate({"trackio": {"folder": str(tmp_path / "curves")}})
    tracked = TRAINING.model_copy(update={"trackers": trackers, "log_every": 1})
    plain = train(files.train_run(out=tmp_path / "plain"), ProgramContext())
    run = files.train_run(training=tracked)
    first, again = train(run, ProgramContext()), train(run, ProgramContext())
    assert {each["weights_digest"] for each in (plain, first, again)} == {plain["weights_digest"]}
    with sqlite3.connect(tmp_path / "curves" / "draftworks.db") as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        (config,) = database.execute("select config from configs").fetchone()
    assert len({name for name, _, _ in found}) == 1
    assert [step for _, step, metrics in found if "train/lr" in json.loads(metrics)] == list(range(1, 9))
    parameters = json.loads(config)
    assert parameters["training.lr"] == tracked.lr
    assert parameters["target"] == tiny_target.name
