"""Strategies from training to export by the generic programs; what one draws or schedules goes on when a training resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_run_files import DFLASH_OPTIONS, TRAINING, RunFiles
from safetensors.torch import load_file

from draftworks.config.run_files import ExportRun, TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.programs.evaluate import evaluate
from draftworks.programs.export import export
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.training.checkpoint_files import CheckpointFolder
from draftworks.training.history import History

PEAGLE = {"num_depths": 3, "num_layers": 2, "draft_vocab_size": 64, "intermediate_size": 32, "layer_ids": [2, 4, 5]}
RUNS: dict[str, dict[str, Any]] = {
    "domino": {"options": {**DFLASH_OPTIONS, "emb_dim": 8, "gru_hidden_dim": 12}, "vocab_mapping": None},
    "dspark": {"options": {**DFLASH_OPTIONS, "markov_rank": 8}, "vocab_mapping": None},
    "peagle": {"options": PEAGLE},
}


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def training(**changes: Any) -> dict[str, Any]:
    return {"training": TRAINING.model_copy(update={"publish": "last", **changes})}


def read_metric_sums(folder: Path) -> dict[str, list[float]]:
    """Return the sums of the last evaluation on the held-out set."""
    return History.load(folder / "history.json").evals[-1].result.metric_sums


@pytest.mark.parametrize("strategy", RUNS)
def test_a_draft_is_trained_measured_and_exported(files: RunFiles, strategy: str) -> None:
    run = {"strategy": strategy, **RUNS[strategy]}
    trained = train(files.train_run(**run, **training()), ProgramContext())
    assert trained["last_loss"] < trained["first_loss"]
    report = evaluate(files.evaluate_run(**run), ProgramContext())["drafts"]
    assert list(report)[:2] == ["trained", "untrained"]
    assert report["trained"]["eval/simulated_acc_len"] >= 0
    assert report["trained"]["eval/rung3_walk_acc_len"] >= 0
    assert (report["trained"].get("eval/tau", 0) > 0) is (strategy == "dspark")
    (files.folder / "exported").mkdir()
    exports = ExportRun(out=files.folder / "exported", target=files.target, draft=files.folder / "draft")
    formats = export(exports, ProgramContext())["formats"]
    assert set(formats) == {each.name for each in resolve_strategy(strategy).usual_exports}
    assert all(exported["passed"] for exported in formats.values())
    if strategy == "domino":
        assert "DFLASH" in formats["zlab_domino"]["commands"]["SGLang"]


@pytest.mark.parametrize("strategy", ["domino", "peagle"])
def test_a_training_cut_in_two_ends_with_the_same_weights(files: RunFiles, strategy: str) -> None:
    """Domino's λ falls over the first four of eight steps, P-EAGLE draws chains; the second training begins after step 3."""
    run = {"strategy": strategy, **RUNS[strategy], **training(save_every=3, keep_checkpoints=9)}
    whole = files.train_run(**run)
    done = train(whole, ProgramContext())
    after_three = CheckpointFolder(whole.checkpoints, whole.run_id).final(3)
    again = train(files.train_run(out=files.folder / "rest", resume_from=after_three, **run), ProgramContext())
    assert [session["from_step"] for session in again["sessions"]] == [0, 3]
    assert again["weights_digest"] == done["weights_digest"]


def test_counts_of_dominos_prefixes_are_kept_with_the_curve(files: RunFiles) -> None:
    run = files.train_run(strategy="domino", **RUNS["domino"])
    train(run, ProgramContext())
    sums = read_metric_sums(run.out)
    for name in ("accept_len", "base_accept_len"):
        assert 0 <= sum(sums[f"{name}_sums"]) <= 3 * sum(sums[f"{name}_denoms"])
    assert sum(sums["accept_len_denoms"]) > 0
    assert len(sums["base_acc_corrects"]) == len(sums["acc_corrects"]) == 3


def test_what_rejection_sampling_would_accept_of_dspark_is_kept_with_the_curve(files: RunFiles) -> None:
    run = files.train_run(strategy="dspark", **RUNS["dspark"])
    train(run, ProgramContext())
    sums = read_metric_sums(run.out)
    blocks = sums["tau_denoms"][0]
    assert 0 < sums["tau_sums"][0] < 3 * blocks
    assert 0 <= sums["accept_len_sums"][0] <= 3 * blocks
    assert len(sums["acceptance_sums"]) == len(sums["confidence_error_sums"]) == 3


def test_a_packed_training_goes_as_far_as_a_padded_one(files: RunFiles) -> None:
    run = {"strategy": "peagle", **RUNS["peagle"]}
    padded = train(files.train_run(**run, **training(max_steps=3)), ProgramContext())
    packed = files.train_run(out=files.folder / "packed", **run, **training(max_steps=3, pack_tokens=64))
    assert train(packed, ProgramContext())["last_loss"] == pytest.approx(padded["last_loss"], rel=1e-4)


def test_embeddings_that_are_trained_are_published_with_the_draft_and_others_are_not(files: RunFiles) -> None:
    few = training(max_steps=2)
    own = files.train_run(strategy="peagle", options=PEAGLE, **few)
    train(own, ProgramContext())
    learned = load_file(own.out / "model.safetensors")["embed_tokens.weight"]
    assert not learned.equal(TargetParts.load(files.target).embedding.float())
    shared = files.train_run(
        out=files.folder / "shared", strategy="peagle", options={**PEAGLE, "train_embeddings": False}, **few
    )
    train(shared, ProgramContext())
    assert "embed_tokens.weight" not in load_file(shared.out / "model.safetensors")
