"""The training program is stopped and goes on, from the same run file; and what it publishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from draft_run_files import OPTIONS, STREAMS, TRAINING, RunFiles
from forked_ranks import ForkedRanks
from processes import end_tree, ending
from safetensors.torch import load_file
from waiting import HANG_S, wait_until

from draftworks.config.run_files import TargetFiles, TrainRun
from draftworks.drafts.draft_io import read_draft_config
from draftworks.errors import StoreError
from draftworks.features.manifest import read_feature_set, write_feature_set
from draftworks.programs.failure import RankFailure
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.training.checkpoint_files import CheckpointFolder
from draftworks.training.history import History

LONG = TRAINING.model_copy(
    update={"epochs": 99.0, "max_steps": 120, "save_every": 5, "eval_every": 30, "device": "cpu", "processes": 2}
)


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def checkpoints(run: TrainRun) -> CheckpointFolder:
    return CheckpointFolder(run.checkpoints, run.run_id)


def tree(folder: Path) -> dict[str, int]:
    """Every file below a folder, and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def torchrun(logs: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*command, "--log-dir", str(logs), "-m"]


def started(launcher: list[str], run: TrainRun) -> subprocess.Popen:
    path = run.save(run.out.with_suffix(".yaml"))
    output = run.out.with_suffix(".log").open("w")
    return subprocess.Popen([*launcher, "draftworks.programs.train", str(path)], stdout=output, stderr=output)


def terminated(launcher: list[str], run: TrainRun) -> int:
    """Exit code of a training all of whose processes get SIGTERM twice when it has saved its first checkpoint.

    So does Slurm, within a millisecond, and torchrun passes it on once more.
    """
    process = started(launcher, run)
    with ending(process):
        wait_until(lambda: checkpoints(run).steps(), "a checkpoint", possible=lambda: process.poll() is None)
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in everyone * 2:
            each.terminate()
        return process.wait()


@pytest.mark.slow
def test_terminated_torchrun_goes_on_to_the_same_weights(files: RunFiles, request: pytest.FixtureRequest) -> None:
    half = LONG.model_copy(update={"max_steps": 60})
    run = files.train_run(training=half)
    logs = files.folder / "logs"
    assert terminated(torchrun(logs), run) != 0
    stopped_after = checkpoints(run).steps()[-1]
    assert 5 <= stopped_after < half.max_steps
    failures = [RankFailure.read(path) for path in logs.rglob("error.json")]
    assert sorted(failure.rank for failure in failures) == [0, 1]
    for failure in failures:
        assert failure.interrupted
        assert f"interrupted by SIGTERM after step {stopped_after}; its checkpoint is saved" in failure.message
    assert not (run.out / "config.json").exists()

    undisturbed = files.train_run(training=half, out=files.folder / "undisturbed")
    undisturbed.out.mkdir()
    again = started(torchrun(files.folder / "more-logs"), run)
    request.addfinalizer(lambda: end_tree(again))
    undisturbed_file = str(undisturbed.save(undisturbed.out / "run.yaml"))
    log = undisturbed.out / "out.log"
    ranks = ForkedRanks.start("draftworks.programs.train", [undisturbed_file], 2, files.folder / "ranks", log)
    assert ranks.wait(HANG_S) == [0, 0], log.read_text()
    assert again.wait() == 0
    assert read_draft_config(run.out).weights_digest == read_draft_config(undisturbed.out).weights_digest
    sessions = History.load(run.out / "history.json").sessions
    assert [(session.start_step, session.world_size) for session in sessions] == [(0, 2), (stopped_after, 2)]


@pytest.mark.slow
def test_terminated_single_process_exits_with_143_and_goes_on(files: RunFiles) -> None:
    run = files.train_run(training=LONG)
    assert terminated([sys.executable, "-m"], run) == 128 + 15
    stopped_after = checkpoints(run).steps()[-1]
    assert f"interrupted by SIGTERM after step {stopped_after}" in run.out.with_suffix(".log").read_text()
    report = train(run, ProgramContext())
    assert report["steps"] == LONG.max_steps
    assert [session["from_step"] for session in report["sessions"]] == [0, stopped_after]


@pytest.mark.parametrize(("publish", "step"), [("best", 4), ("last", 8)])
def test_published_weights_are_those_of_the_best_or_the_last_checkpoint(
    files: RunFiles, publish: str, step: int
) -> None:
    """No evaluation is better than the first one by so much."""
    run = files.train_run(training=TRAINING.model_copy(update={"publish": publish, "best_min_delta": 1e6}))
    report = train(run, ProgramContext())
    provenance = read_draft_config(run.out).provenance
    assert (
        (provenance["published_step"], provenance["steps"]) == (report["published_step"], report["steps"]) == (step, 8)
    )
    assert report["best"]["step"] == 4
    published, checkpoint = (load_file(f / "model.safetensors") for f in (run.out, checkpoints(run).final(step)))
    assert published.keys() == checkpoint.keys()
    assert all(published[name].equal(checkpoint[name]) for name in published)
    heldout = History.load(run.out / "history.json").find_evaluation(step).metrics()
    assert report["heldout"] == heldout


def test_finished_training_is_only_published_again(files: RunFiles, capsys: pytest.CaptureFixture[str]) -> None:
    run = files.train_run()
    first = train(run, ProgramContext())
    before = tree(run.checkpoints)
    again = train(run, ProgramContext())
    assert "going on from draft-step8" in capsys.readouterr().out
    assert again["weights_digest"] == first["weights_digest"]
    assert tree(run.checkpoints) == before


def other_training(**changes: Any) -> dict[str, Any]:
    return {"training": TRAINING.model_copy(update=changes)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (other_training(lr=1e-3), "training.lr: the checkpoint has 0.005, this training 0.001"),
        (other_training(global_batch_size=8), "training.global_batch_size: the checkpoint has 4, this training 8"),
        (other_training(seed=1), "training.seed: the checkpoint has 42, this training 1"),
        ({"options": {**OPTIONS, "ttt_length": 3}}, "options.ttt_length: the checkpoint has 2, this training 3"),
    ],
)
def test_checkpoint_of_another_training_is_refused(files: RunFiles, changes: dict[str, Any], message: str) -> None:
    run = files.train_run()
    train(run, ProgramContext())
    before = tree(run.out)
    with pytest.raises(StoreError) as caught:
        train(files.train_run(**changes), ProgramContext())
    assert message in str(caught.value)
    assert tree(run.out) == before


def test_checkpoint_of_other_data_is_refused(files: RunFiles) -> None:
    run = files.train_run()
    train(run, ProgramContext())
    before = tree(run.out)
    more = files.feature_set("more", samples=9, seed=3)
    ours, theirs = (read_feature_set(each.features).version_of(STREAMS) for each in (more, run.train))
    with pytest.raises(StoreError) as caught:
        train(files.train_run(train=more), ProgramContext())
    told = str(caught.value)
    assert "train.tokens: the checkpoint has" in told
    assert f"train.features: the checkpoint has {theirs}, this training {ours}" in told
    assert tree(run.out) == before


def test_a_training_goes_on_where_features_that_it_does_not_read_were_captured_since(files: RunFiles) -> None:
    run = files.train_run(options={**OPTIONS, "layer_ids": [2, 4]})
    captured = {each.features: read_feature_set(each.features) for each in (run.train, run.heldout)}
    own = ("hf2", "hf4", "last")
    for folder, found in captured.items():
        write_feature_set(folder, [ref.select(own) for ref in found.refs], found.identity, own, found.store)
    first = train(run, ProgramContext())
    for folder, found in captured.items():
        write_feature_set(folder, found.refs, found.identity, found.streams, found.store)
    again = train(run, ProgramContext())
    assert again["weights_digest"] == first["weights_digest"]
    assert again["sessions"][-1]["from_step"] > 0


def test_named_checkpoint_goes_on_elsewhere_and_in_other_pieces(files: RunFiles) -> None:
    run = files.train_run(**other_training(save_every=3, keep_checkpoints=9, publish="last"))
    whole = train(run, ProgramContext())
    pieces = {"micro_batch_size": 1, "log_every": 2, "save_every": 1, "keep_checkpoints": 5, "publish": "last"}
    elsewhere = files.train_run(
        out=files.folder / "elsewhere", resume_from=checkpoints(run).final(6), **other_training(**pieces)
    )
    report = train(elsewhere, ProgramContext())
    assert [session["from_step"] for session in report["sessions"]] == [0, 6]
    assert checkpoints(elsewhere).steps() == [4, 7, 8]  # 4 was the best so far, and came along
    assert report["heldout"]["eval/avg_loss"] == pytest.approx(whole["heldout"]["eval/avg_loss"], rel=1e-5)


def test_path_that_is_no_checkpoint_is_refused(files: RunFiles) -> None:
    run = files.train_run(resume_from=files.folder / "store")
    with pytest.raises(StoreError, match="store: not a complete checkpoint: checkpoint.json is missing"):
        train(run, ProgramContext())
    assert not any(run.out.iterdir())
