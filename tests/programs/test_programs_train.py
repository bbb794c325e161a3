"""The training and evaluation programs, alone and on two ranks, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from draft_run_files import DFLASH_OPTIONS, OPTIONS, TRAINING, RunFiles
from safetensors.torch import load_file

from draftworks.config.run_files import VOCAB_FILE, TargetFiles, TrainRun
from draftworks.drafts.draft_io import read_draft_config
from draftworks.errors import ConfigError, DataError, DraftworksError, StoreError
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.rivals.names import RIVAL_MEANINGS
from draftworks.features.manifest import FeatureSetIdentity, read_feature_set, write_feature_set
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.training.history import History


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def test_training_leaves_draft_history_and_picture(files: RunFiles) -> None:
    run = files.train_run()
    report = train(run, ProgramContext())
    assert sorted(path.name for path in run.out.iterdir()) == [
        "checkpoints",
        "config.json",
        "history.json",
        "model.safetensors",
        "training.png",
        "vocab.safetensors",
    ]
    history = History.load(run.out / "history.json")
    assert (report["steps"], report["world_size"]) == (history.steps, 1) == (8, 1)
    assert report["last_loss"] < report["first_loss"]
    assert report["peak_rss_bytes"] > 2**20
    config = read_draft_config(run.out)
    assert config.weights_digest == report["weights_digest"]
    assert config.provenance["steps"] == 8
    assert "embed_tokens" not in load_file(run.out / "model.safetensors")


def test_evaluation_compares_with_the_untrained_draft_and_what_costs_nothing(files: RunFiles) -> None:
    trained = train(files.train_run(), ProgramContext())
    report = evaluate(files.evaluate_run(), ProgramContext())
    assert list(report["drafts"]) == ["trained", "untrained", *RIVAL_MEANINGS]
    assert report["drafts"]["trained"]["eval/per_position_acc"] == trained["heldout"]["eval/per_position_acc"]
    chains = [report["drafts"][name] for name in ("trained", "untrained", "bigram")]
    assert len({metrics["eval/supervised_tokens"] for metrics in chains}) == 1
    assert all(len(measured.walk) == 3 for measured in Report.load(files.folder / "report").drafts.values())
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
    assert_refused(files, ConfigError, "unknown strategy 'dflsh': did you mean dflash", strategy="dflsh")


def test_unknown_option_is_refused(files: RunFiles) -> None:
    options = {**OPTIONS, "ttt_lenght": 3}
    assert_refused(files, ConfigError, "unknown key ttt_lenght; did you mean ttt_length", options=options)


def test_missing_vocabulary_mapping_is_refused(files: RunFiles) -> None:
    assert_refused(files, ConfigError, "needs a vocabulary mapping", vocab_mapping=None)


def test_a_vocabulary_that_is_lost_from_a_draft_says_how_to_get_it_back(files: RunFiles) -> None:
    lost = files.folder / "draft" / "vocab.safetensors"
    assert_refused(files, StoreError, f"{lost}: .* cannot be read .*train the draft again", vocab_mapping=lost)


def test_features_of_another_target_are_refused(files: RunFiles, tiny_target: TargetFiles) -> None:
    other = tiny_target.model_copy(update={"digest": "f" * 16})
    assert_refused(files, StoreError, f"features of target {tiny_target.digest}, expected ffff", target=other)


def test_missing_feature_is_named(files: RunFiles) -> None:
    options = {**OPTIONS, "layer_ids": [1, 4, 5]}
    assert_refused(files, StoreError, r"needs the features \['hf1'\], found .*hf2", options=options)


def test_hidden_states_before_the_final_norm_are_refused(files: RunFiles) -> None:
    folder = files.train_run().train.features
    found = read_feature_set(folder)
    write_feature_set(folder, found.refs, FeatureSetIdentity(last_normed=False), found.streams, found.store)
    assert_refused(files, StoreError, "`last` was captured before the target's final norm")


def test_features_of_several_dtypes_are_refused(files: RunFiles) -> None:
    folder = files.train_run().train.features
    found = read_feature_set(folder)
    first = found.refs[0]
    specs = {**first.feature_specs, "last": replace(first.feature_specs["last"], dtype="bfloat16")}
    refs = [replace(first, feature_specs=specs), *found.refs[1:]]
    write_feature_set(folder, refs, FeatureSetIdentity(dtype="float32"), found.streams, found.store)
    assert_refused(files, StoreError, "features of several dtypes, bfloat16, float32")


def test_held_out_features_of_another_dtype_than_the_training_features_are_refused(files: RunFiles) -> None:
    folder = files.train_run().heldout.features
    found = read_feature_set(folder)
    write_feature_set(folder, found.refs, FeatureSetIdentity(dtype="bfloat16"), found.streams, found.store)
    assert_refused(files, StoreError, "held-out features are bfloat16, training features float32")


def test_features_without_tokens_are_refused(files: RunFiles) -> None:
    run = files.train_run()
    mixed = run.train.model_copy(update={"tokens": run.heldout.tokens})
    assert_refused(files, StoreError, "9 of 9 samples are not in the tokenized set", train=mixed)


def test_too_few_samples_are_refused(files: RunFiles) -> None:
    training = TRAINING.model_copy(update={"global_batch_size": 16})
    assert_refused(files, ConfigError, "global_batch_size 16 is larger than the set of 9 samples", training=training)


def test_ranks_that_do_not_divide_the_batch_are_refused(files: RunFiles) -> None:
    training = TRAINING.model_copy(update={"micro_batch_size": 3})
    assert_refused(files, ConfigError, "4 is not a multiple of micro_batch_size 3 x ranks 1", training=training)


def test_mapping_of_another_size_than_the_option_is_refused(files: RunFiles) -> None:
    options = {**OPTIONS, "draft_vocab_size": 65}
    message = "draft_vocab_size is 65, the vocabulary mapping holds 64 tokens"
    assert_refused(files, ConfigError, message, options=options)


def test_held_out_set_without_anything_to_measure_is_refused_before_training(
    files: RunFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    heldout = files.feature_set("silent", samples=3, seed=2, first_supervised=100)
    assert_refused(files, DataError, "silent-tokens: the held-out set has no supervised token", heldout=heldout)
    assert "step=" not in capsys.readouterr().out


def test_evaluations_and_the_last_step_are_shown_however_fast_they_come(
    files: RunFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    train(files.train_run(), ProgramContext())
    out = capsys.readouterr().out
    assert "step=8/8" in out
    assert out.count("heldout_acceptance_length_rung1=") == 2


def test_short_training_has_two_losses(files: RunFiles) -> None:
    training = TRAINING.model_copy(update={"log_every": 50, "max_steps": 6})
    report = train(files.train_run(training=training), ProgramContext())
    points = History.load(files.folder / "draft" / "history.json").train
    assert [point.step for point in points] == [1, 6]
    assert (report["first_loss"], report["last_loss"]) == (points[0].loss, points[1].loss)


def test_training_of_nothing_has_no_loss_and_is_still_evaluated(files: RunFiles) -> None:
    silent = files.feature_set("silent", samples=9, seed=2, first_supervised=100)
    for loss in ("token_mean", "specforge"):
        out = files.folder / loss
        report = train(files.train_run(out=out, train=silent, options={**OPTIONS, "loss": loss}), ProgramContext())
        assert (report["first_loss"], report["last_loss"]) == (None, None)
        assert report["heldout"]["eval/simulated_acc_len"] >= 0


def test_micro_batch_size_of_an_evaluation_changes_nothing(files: RunFiles) -> None:
    train(files.train_run(), ProgramContext())
    first, second = (evaluate(files.evaluate_run(micro_batch_size=n), ProgramContext())["drafts"] for n in (1, 3))
    for name, metrics in first.items():
        assert metrics.get("eval/per_position_acc") == second[name].get("eval/per_position_acc")
    for name in ("eval/conditional_acceptance_rate_", "eval/unconditional_acceptance_rate_"):
        rates = [second["trained"][f"{name}{step}"] for step in range(OPTIONS["ttt_length"])]
        assert all(0 < rate < 1 for rate in rates)
        assert first["trained"][f"{name}0"] == pytest.approx(rates[0], rel=1e-4)


def test_a_strategy_that_makes_no_chain_is_compared_with_bigrams_on_the_walk_alone(files: RunFiles) -> None:
    other = {"strategy": "dflash", "options": DFLASH_OPTIONS, "vocab_mapping": None}
    trained = train(files.train_run(**other), ProgramContext())
    assert trained["last_loss"] < trained["first_loss"]
    report = evaluate(files.evaluate_run(**other), ProgramContext())
    assert list(report["drafts"]) == ["trained", "untrained", *RIVAL_MEANINGS]
    assert list(report["drafts"]["bigram"]) == ["eval/rung3_walk_acc_len"]
    assert report["drafts"]["trained"]["eval/rung3_walk_acc_len"] >= 0


def test_a_draft_that_starts_from_another_is_that_one_until_it_is_trained(files: RunFiles) -> None:
    first = files.train_run()
    done = train(first, ProgramContext())
    elsewhere = {"start_from": first.out, "vocab_mapping": first.out / VOCAB_FILE}
    as_it_is = TRAINING.model_copy(update={"max_steps": 0})
    report = train(files.train_run(out=files.folder / "same", training=as_it_is, **elsewhere), ProgramContext())
    assert (report["steps"], report["first_loss"]) == (0, None)
    assert report["weights_digest"] == done["weights_digest"]
    assert report["heldout"] == done["heldout"]


def test_training_further_never_publishes_less_than_it_began_with(files: RunFiles) -> None:
    first = files.train_run()
    done = train(first, ProgramContext())
    # Decay times rate is 1, so a step forgets the weights and puts the optimizer's update, whose size is bounded, in their
    # place: a bad draft, and a finite one however a processor rounds.
    harmful = TRAINING.model_copy(update={"lr": 1.0, "weight_decay": 1.0, "warmup_ratio": 0.0, "seed": 1})
    run = files.train_run(
        out=files.folder / "worse",
        options={**OPTIONS, "step_decay": 0.5},
        training=harmful,
        start_from=first.out,
        vocab_mapping=first.out / VOCAB_FILE,
    )
    report = train(run, ProgramContext())
    assert report["steps"] == done["steps"]
    assert report["heldout"]["eval/simulated_acc_len"] >= done["heldout"]["eval/simulated_acc_len"]
    assert report["published_step"] == 0 or report["best"]["score"] > done["best"]["score"]


def test_a_draft_of_other_options_is_nothing_to_start_from(files: RunFiles) -> None:
    first = files.train_run()
    train(first, ProgramContext())
    for options, message in (
        ({"intermediate_size": 48}, r"draft\.intermediate_size: expected 48, found 32"),
        ({"feedback": "post_norm"}, r"options: expected .*post_norm.*found .*pre_norm"),
    ):
        run = files.train_run(out=files.folder / "other", options={**OPTIONS, **options}, start_from=first.out)
        with pytest.raises(StoreError, match=message):
            train(run, ProgramContext())


def test_draft_of_other_options_is_not_evaluated(files: RunFiles) -> None:
    train(files.train_run(), ProgramContext())
    run = files.evaluate_run(options={**OPTIONS, "step_decay": 0.5})
    with pytest.raises(StoreError, match=r"draft\.options: expected .*0\.5.*found .*0\.8"):
        evaluate(run, ProgramContext())
    assert not any(run.out.iterdir())
