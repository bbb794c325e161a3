"""The real speculators library loads an exported MTP layer, and computes our logits and losses where it trains as it does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from model_families import HIDDEN, VOCAB
from mtp_toys import mtp, save_target_with_mtp, save_tuned
from safetensors.torch import load_file, save_file

from draftworks.drafts.documents import Documents
from draftworks.drafts.target_parts import TargetParts
from draftworks.export.exporting import export_draft
from draftworks.strategies.mtp.model import next_token_losses

pytestmark = pytest.mark.speculators

TOOL = Path(__file__).resolve().parents[2] / "tools" / "speculators_mtp.py"
STEPS, LENGTH = 3, 12
ROWS = LENGTH - STEPS - 1
"""The library computes each step at these rows alone."""


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe"])
def test_the_library_computes_our_logits_and_losses(kind: str, speculators_python: Path, tmp_path: Path):
    target = save_target_with_mtp(kind, tmp_path / "target")
    draft = save_tuned(target, tmp_path / "draft", 0.01)
    assert export_draft(draft, "speculators_mtp", tmp_path / "out", "float32").passed
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (1, LENGTH), generator=generator)
    last = torch.randn(1, LENGTH, HIDDEN, generator=generator)
    mask = torch.arange(LENGTH)[None] > 3
    save_file({"input_ids": ids, "hidden_states": last, "loss_mask": mask.long()}, tmp_path / "in")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [str(speculators_python), str(TOOL), *(str(tmp_path / name) for name in ("out", "in", "answer"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = load_file(tmp_path / "answer")
    model = mtp(TargetParts.load(target)).model
    model.load_state_dict(dict(draft.weights))
    documents = Documents.from_lengths((LENGTH,))
    with torch.no_grad():
        states = model.unroll(last, STEPS, documents, "step", lambda step, _: documents.shift_left(ids, 1 + step))
        states = [each[0, :ROWS] for each in states]
        torch.testing.assert_close(torch.stack(states) @ model.target_head.T, said["logits"], rtol=0, atol=1e-5)
        counted = [mask[0, step + 2 : step + 2 + ROWS] for step in range(STEPS)]
        labels = [ids[0, step + 2 : step + 2 + ROWS][on] for step, on in enumerate(counted)]
        kept = torch.cat([each[on] for each, on in zip(states, counted)])
        losses = next_token_losses(kept, model.target_head, labels, [1.0] * STEPS)
    means = losses.sums["loss_sums"] / torch.stack([on.sum() for on in counted])
    torch.testing.assert_close(means, said["losses"].double(), rtol=0, atol=1e-5)
