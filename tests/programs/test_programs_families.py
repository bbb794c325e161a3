"""From conversations to exports with a target of every family: answers, features, a draft, its acceptance, its gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from answer_toys import answering_run, conversation
from coverings import gate_or_long
from model_families import DRAFT_OPTIONS, FAMILIES, LAYERS, TAPS

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

STRATEGIES = ("eagle3", "dflash", "peagle", "domino", "dspark", "lilicorr", "dflash2", "xpress")
"""Each of any target; of targets with an MTP layer: test_programs_mtp."""
TRAINING = TrainingSpec(
    global_batch_size=4, micro_batch_size=2, epochs=2, lr=5e-3, compute_dtype="float32", device="cpu", eval_every=4
)


# Of each kind of target one: plain, with layers that sum up and experts, with a wrapper and scaled embeddings.
@pytest.mark.parametrize(
    ("name", "strategy"),
    gate_or_long(
        zip(FAMILIES, STRATEGIES * 3), lambda case: case[0] in ("qwen3", "qwen3_next", "gemma3", "deepseek_v3")
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
    (tmp_path / "report").mkdir()
    measured = EvaluateRun(
        out=tmp_path / "report",
        draft=tmp_path / "draft",
        train_tokens=train_set.tokens,
        evaluation=EvaluationSpec(resamples=100, loop=LoopSpec(prompts=2)),
        max_new_tokens=12,
        device="cpu",
        **common,
    )
    report = evaluate(measured, ProgramContext())
    assert report["label_agreement"] == 1.0
    assert report["drafts"]["trained"]["eval/rung3_walk_acc_len"] >= 0
    assert report["drafts"]["trained"]["eval/rung4_loop_t0_acc_len"] >= 0
    (tmp_path / "export").mkdir()
    run = ExportRun(out=tmp_path / "export", target=target, draft=tmp_path / "draft")
    written = export(run, ProgramContext())
    assert all(result["passed"] for result in written["formats"].values()), written
    assert written["formats"]
    unscaled = [each.name for each in resolve_strategy(strategy).exports if each.uses_unscaled_embeddings]
    assert list(written["refused"]) == (unscaled if name.startswith("gemma") else [])


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
