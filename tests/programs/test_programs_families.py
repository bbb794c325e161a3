"""From conversations to exports with a target of every family: answers, features, a draft, its acceptance, its gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_toys import answering_run, conversation
from coverings import gate_or_long
from model_families import DRAFT_OPTIONS, FAMILIES, LAYERS, TAPS
from mtp_toys import save_target_with_mtp

from draftworks.config.registry_files import CaptureSpec, EvaluationSpec, LoopSpec, TrainingSpec
from draftworks.config.run_files import (
    TOKENS_FOLDER,
    VOCAB_FILE,
    CaptureRun,
    EvaluateRun,
    ExportRun,
    FeatureSet,
    TargetFiles,
    TrainRun,
)
from draftworks.config.strategies import resolve_strategy
from draftworks.data.prepare import map_vocabulary
from draftworks.programs.capture import capture
from draftworks.programs.evaluate import evaluate
from draftworks.programs.export import export
from draftworks.programs.program import ProgramContext
from draftworks.programs.regenerate import regenerate
from draftworks.programs.train import train

TRAINING = TrainingSpec(
    global_batch_size=4, micro_batch_size=2, epochs=2, lr=5e-3, compute_dtype="float32", device="cpu", eval_every=4
)


# Of each kind of target one: plain, with layers that sum up and experts, with a wrapper and scaled embeddings.
@pytest.mark.parametrize(
    ("name", "strategy"),
    gate_or_long(
        zip(FAMILIES, [*DRAFT_OPTIONS] * 3), lambda case: case[0] in ("qwen3", "qwen3_next", "gemma3", "deepseek_v3")
    ),
)
def test_a_draft_is_made_and_exported(
    name: str, strategy: str, family_target: Callable[[str], TargetFiles], tmp_path: Path
):
    torch.set_num_threads(1)
    target = family_target(name)
    train_set, heldout = (features(target, tmp_path / part, first) for part, first in (("train", 0), ("heldout", 8)))
    vocab = None
    if resolve_strategy(strategy).uses_vocab_mapping:
        map_vocabulary(train_set.tokens, target, 64, tmp_path)
        vocab = tmp_path / VOCAB_FILE
    common = {"target": target, "strategy": strategy, "options": DRAFT_OPTIONS[strategy], "vocab_mapping": vocab}
    common |= {"store": tmp_path / "store", "heldout": heldout}
    (tmp_path / "draft").mkdir()
    trained = train(TrainRun(out=tmp_path / "draft", train=train_set, training=TRAINING, **common), ProgramContext())
    assert trained["steps"] == 4
    written = evaluate_and_export(tmp_path, common, train_set.tokens)
    assert written["formats"]
    unscaled = [each.name for each in resolve_strategy(strategy).exports if each.uses_unscaled_embeddings]
    assert list(written["refused"]) == (unscaled if name.startswith("gemma") else [])


@pytest.mark.parametrize(
    ("kind", "packed"), gate_or_long([("qwen3_5_moe", None), ("deepseek_v3", 200)], [("deepseek_v3", 200)])
)
def test_an_mtp_layer_is_tuned_measured_and_exported(kind: str, packed: int | None, tmp_path: Path):
    torch.set_num_threads(1)
    target = save_target_with_mtp(kind, tmp_path / "target")
    train_set, heldout = (
        features(target, tmp_path / part, first, taps=()) for part, first in (("train", 0), ("heldout", 8))
    )
    common = {"target": target, "strategy": "mtp", "options": {}, "store": tmp_path / "store", "heldout": heldout}
    (tmp_path / "draft").mkdir()
    training = TRAINING.model_copy(update={"pack_tokens": packed})
    trained = train(TrainRun(out=tmp_path / "draft", train=train_set, training=training, **common), ProgramContext())
    assert trained["last_loss"] < trained["first_loss"]
    written = evaluate_and_export(tmp_path, common, train_set.tokens)
    assert "target_mtp" in written["formats"]


def evaluate_and_export(folder: Path, common: dict[str, Any], train_tokens: Path) -> dict[str, Any]:
    """Measure the draft in `folder / "draft"`, and return what its exports are."""
    (folder / "report").mkdir()
    measured = EvaluateRun(
        out=folder / "report",
        draft=folder / "draft",
        train_tokens=train_tokens,
        evaluation=EvaluationSpec(resamples=100, loop=LoopSpec(prompts=2)),
        max_new_tokens=12,
        device="cpu",
        **common,
    )
    report = evaluate(measured, ProgramContext())
    assert report["label_agreement"] == 1.0
    assert report["drafts"]["trained"]["eval/rung3_walk_acc_len"] >= 0
    assert report["drafts"]["trained"]["eval/rung4_loop_t0_acc_len"] >= 0
    (folder / "export").mkdir()
    run = ExportRun(out=folder / "export", target=common["target"], draft=folder / "draft")
    written = export(run, ProgramContext())
    assert all(result["passed"] for result in written["formats"].values()), written
    return written


def features(target: TargetFiles, folder: Path, first: int, taps: Sequence[int] = TAPS) -> FeatureSet:
    """Capture features of four conversations that the target answered."""
    folder.mkdir()
    run = answering_run(
        target, folder, [conversation(first + n) for n in range(8 if first == 0 else 3)],
        responses={"max_new_tokens": 12}, max_length=120, max_rejected_share=1.0,
    )  # fmt: skip
    assert regenerate(run, ProgramContext())["generated_tokens"] > 12
    captured = CaptureRun(
        out=folder / "features",
        target=target,
        tokens=run.out / TOKENS_FOLDER,
        taps=list(taps),
        capture=CaptureSpec(dtype="float32", compute_dtype="float32", device="cpu", batch_tokens=200),
        store=folder.parent / "store",
    )
    report = capture(captured, ProgramContext())
    assert report["failed_samples"] == 0
    assert max(taps, default=0) < LAYERS
    return FeatureSet(tokens=captured.tokens, features=captured.out)
