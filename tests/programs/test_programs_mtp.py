"""A target's own MTP layer from features without taps to a trained draft, its figures on every rung, and its exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from mtp_toys import save_target_with_mtp
from test_programs_families import TRAINING, features

from draftworks.config.registry_files import EvaluationSpec, LoopSpec
from draftworks.config.run_files import EvaluateRun, ExportRun, TrainRun
from draftworks.programs.evaluate import evaluate
from draftworks.programs.export import export
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train


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
    written = export(ExportRun(out=tmp_path / "export", target=target, draft=tmp_path / "draft"), ProgramContext())
    assert all(result["passed"] for result in written["formats"].values()), written
    assert "target_mtp" in written["formats"]
