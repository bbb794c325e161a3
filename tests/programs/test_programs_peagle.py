"""P-EAGLE from training to measurement by the generic programs; its draws continue when a training resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_run_files import TRAINING, RunFiles
from safetensors.torch import load_file

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.training.checkpoint_files import CheckpointFolder

OPTIONS = {"num_depths": 3, "num_layers": 2, "draft_vocab_size": 64, "intermediate_size": 32, "layer_ids": [2, 4, 5]}
PEAGLE = {"strategy": "peagle", "options": OPTIONS}


@pytest.fixture
def files(tmp_path: Path, tiny_target: TargetFiles) -> RunFiles:
    return RunFiles.make(tmp_path, tiny_target)


def training(**changes: Any) -> dict[str, Any]:
    return {"training": TRAINING.model_copy(update={"publish": "last", **changes})}


def test_a_peagle_draft_is_trained_and_measured_on_every_rung(files: RunFiles) -> None:
    trained = train(files.train_run(**PEAGLE), ProgramContext())
    assert trained["last_loss"] < trained["first_loss"]
    report = evaluate(files.evaluate_run(**PEAGLE), ProgramContext())["drafts"]
    assert list(report) == ["trained", "untrained"]
    assert report["trained"]["eval/simulated_acc_len"] >= 0
    assert report["trained"]["eval/rung3_walk_acc_len"] >= 0


def test_a_training_cut_in_two_draws_the_same_chains_and_ends_with_the_same_weights(files: RunFiles) -> None:
    whole = files.train_run(**PEAGLE, **training(save_every=3, keep_checkpoints=9))
    done = train(whole, ProgramContext())
    after_three = CheckpointFolder(whole.checkpoints, whole.run_id).final(3)
    rest = files.train_run(
        out=files.folder / "rest", resume_from=after_three, **PEAGLE, **training(save_every=3, keep_checkpoints=9)
    )
    again = train(rest, ProgramContext())
    assert [session["from_step"] for session in again["sessions"]] == [0, 3]
    assert again["weights_digest"] == done["weights_digest"]


def test_a_packed_training_goes_as_far_as_a_padded_one(files: RunFiles) -> None:
    padded = train(files.train_run(**PEAGLE, **training(max_steps=3)), ProgramContext())
    packed = train(
        files.train_run(out=files.folder / "packed", **PEAGLE, **training(max_steps=3, pack_tokens=64)),
        ProgramContext(),
    )
    assert packed["last_loss"] == pytest.approx(padded["last_loss"], rel=1e-4)


def test_embeddings_that_are_trained_are_published_with_the_draft_and_others_are_not(files: RunFiles) -> None:
    few = training(max_steps=2)
    own = files.train_run(**PEAGLE, **few)
    train(own, ProgramContext())
    learned = load_file(own.out / "model.safetensors")["embed_tokens.weight"]
    assert not learned.equal(TargetParts.load(files.target).embedding.float())
    options = {**OPTIONS, "train_embeddings": False}
    shared = files.train_run(out=files.folder / "shared", strategy="peagle", options=options, **few)
    train(shared, ProgramContext())
    assert "embed_tokens.weight" not in load_file(shared.out / "model.safetensors")
