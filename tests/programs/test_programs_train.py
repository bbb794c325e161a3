"""The training and evaluation programs, alone and on two ranks, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from draft_run_files import OPTIONS, TRAINING, RunFiles
from safetensors.torch import load_file

from draftworks.drafts.draft_io import read_config
from draftworks.errors import ConfigError, DraftworksError, StoreError
from draftworks.evaluation.report import Report
from draftworks.features.manifest import read_feature_set, write_feature_set
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.runs import TargetFiles, TrainRun
from draftworks.training.history import History


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def test_training_leaves_draft_history_and_picture(files: RunFiles) -> None:
    run = files.train_run()
    report = train(run, ProgramContext())
    assert sorted(path.name for path in run.out.iterdir()) == [
        "config.json",
        "history.json",
        "model.safetensors",
        "training.png",
    ]
    history = History.load(run.out / "history.json")
    assert (report["steps"], report["world_size"]) == (history.steps, 1) == (8, 1)
    assert report["last_loss"] < report["first_loss"]
    assert report["peak_rss_bytes"] > 2**20
    config = read_config(run.out)
    assert config.weights_digest == report["weights_digest"]
    assert config.provenance["steps"] == 8
    assert "embed_tokens" not in load_file(run.out / "model.safetensors")


def test_evaluation_compares_trained_untrained_and_bigram(files: RunFiles) -> None:
    trained = train(files.train_run(), ProgramContext())
    report = evaluate(files.evaluate_run(), ProgramContext())
    assert list(report["drafts"]) == ["trained", "untrained", "bigram"]
    assert report["drafts"]["trained"]["eval/per_position_acc"] == trained["heldout"]["eval/per_position_acc"]
    tokens = {metrics["eval/supervised_tokens"] for metrics in report["drafts"].values()}
    assert len(tokens) == 1
    saved = Report.load(files.folder / "report")
    assert saved.drafts["trained"].metrics() == report["drafts"]["trained"]


def test_same_run_file_gives_the_same_draft(files: RunFiles) -> None:
    first = train(files.train_run(out=files.folder / "a"), ProgramContext())
    second = train(files.train_run(out=files.folder / "b"), ProgramContext())
    assert first["weights_digest"] == second["weights_digest"]


def test_two_ranks_by_torchrun_from_a_run_file(files: RunFiles) -> None:
    path = files.train_run().save(files.folder / "train.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "draftworks.programs.train", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert '"world_size": 2' in done.stdout
    alone = train(files.train_run(out=files.folder / "alone"), ProgramContext())
    together = History.load(files.folder / "draft" / "history.json")
    assert together.last_loss() == pytest.approx(alone["last_loss"], rel=1e-4)


def test_relative_paths_of_a_run_file_are_taken_from_its_folder(files: RunFiles) -> None:
    path = files.train_run().save(files.folder / "train.yaml")
    path.write_text(path.read_text().replace(f"{files.folder}/", ""))
    assert TrainRun.load(path) == files.train_run()


def assert_refused(files: RunFiles, error: type[DraftworksError], message: str, **changes: object) -> None:
    with pytest.raises(error, match=message):
        train(files.train_run(**changes), ProgramContext())
    assert not any((files.folder / "draft").iterdir())


def test_unknown_strategy_is_refused(files: RunFiles) -> None:
    assert_refused(files, ConfigError, "unknown strategy 'eagle4': did you mean eagle3", strategy="eagle4")


def test_unknown_option_is_refused(files: RunFiles) -> None:
    options = {**OPTIONS, "ttt_lenght": 3}
    assert_refused(files, ConfigError, "unknown key ttt_lenght; did you mean ttt_length", options=options)


def test_missing_vocabulary_mapping_is_refused(files: RunFiles) -> None:
    assert_refused(files, ConfigError, "needs a vocabulary mapping", vocab_mapping=None)


def test_features_of_another_target_are_refused(files: RunFiles, tiny_target: TargetFiles) -> None:
    other = tiny_target.model_copy(update={"digest": "f" * 16})
    assert_refused(files, StoreError, "features of target 0123456789abcdef, expected ffff", target=other)


def test_missing_feature_is_named(files: RunFiles) -> None:
    options = {**OPTIONS, "layer_ids": [1, 4, 5]}
    assert_refused(files, StoreError, r"needs the features \['hf1'\], found .*hf2", options=options)


def test_hidden_states_before_the_final_norm_are_refused(files: RunFiles) -> None:
    folder = files.train_run().train.features
    found = read_feature_set(folder)
    write_feature_set(folder, found.refs, {"last_normed": False}, found.streams, found.store)
    assert_refused(files, StoreError, "`last` was captured before the target's final norm")


def test_features_without_tokens_are_refused(files: RunFiles) -> None:
    run = files.train_run()
    mixed = run.train.model_copy(update={"tokens": run.heldout.tokens})
    assert_refused(files, StoreError, "9 of 9 samples are not in the tokenized set", train=mixed)


def test_too_few_samples_are_refused(files: RunFiles) -> None:
    training = TRAINING.model_copy(update={"global_batch_size": 16})
    assert_refused(files, ConfigError, "9 samples, fewer than global_batch_size 16", training=training)


def test_ranks_that_do_not_divide_the_batch_are_refused(files: RunFiles) -> None:
    training = TRAINING.model_copy(update={"micro_batch_size": 3})
    assert_refused(files, ConfigError, "4 is not a multiple of micro_batch_size 3 x 1 processes", training=training)


def test_draft_of_other_options_is_not_evaluated(files: RunFiles) -> None:
    train(files.train_run(), ProgramContext())
    run = files.evaluate_run(options={**OPTIONS, "step_decay": 0.5})
    with pytest.raises(StoreError, match=r"draft\.options: expected .*0\.5.*found .*0\.8"):
        evaluate(run, ProgramContext())
    assert not any(run.out.iterdir())
