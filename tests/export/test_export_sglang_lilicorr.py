"""SGLang's own code reads exported LiLiCorr drafts and chooses the same candidates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from export_toys import HIDDEN, VOCAB, Toys
from safetensors.torch import save_file
from torch.nn import functional as F

from draftworks.export.exporting import export_draft
from draftworks.strategies.dflash.model import BlockStates
from draftworks.strategies.lilicorr.lattice import find_candidates

ROOT = Path(__file__).resolve().parents[2]
JUDGE = Path(__file__).with_name("sglang_lilicorr_judge.py")
VARIANTS = {
    "narrow": {"lattice_size": 6, "factor_dim": 5, "candidate_topk": 8, "block_size": 6},
    "wide": {"candidate_topk": 4, "logit_scale": 3.0, "lattice_layers": 1, "vector_eps": 1e-3},
}


def exported(toys: Toys, name: str) -> list[list[int]]:
    """Exports a draft with a question beside it, and returns what it proposes itself."""
    draft = toys.draft("lilicorr", name=f"draft-{name}", **VARIANTS[name])
    export_draft(draft, "sglang_lilicorr", toys.folder / name, "float32")
    strategy, generator = draft.build_strategy(), torch.Generator().manual_seed(5)
    states = torch.randn(50, strategy.options.block_size, HIDDEN, generator=generator)
    context = torch.randn(50, HIDDEN, generator=generator)
    anchors = torch.randint(VOCAB, (50,), generator=generator)
    with torch.no_grad():
        normed = strategy.model.backbone.norm(states[:, 1:])
        candidates = find_candidates(F.linear(normed, draft.parts.head.float()), strategy.options.candidate_topk)
    asked = {"states": normed, "context": context, "embedding": draft.parts.embedding.float(), **candidates._asdict()}
    save_file({key: tensor.contiguous() for key, tensor in asked.items()}, toys.folder / f"{name}.safetensors")
    blocks = BlockStates(states, anchors, context)
    return strategy.model.decode(blocks, strategy.draft_tokens, lambda logits: logits.argmax(-1)).tolist()


@pytest.mark.sglang
def test_sglang_chooses_the_candidates_that_the_draft_does(tmp_path: Path):
    toys = Toys.make(tmp_path)
    ours = [exported(toys, name) for name in VARIANTS]
    python = ROOT / ".venv-sglang" / "bin" / "python"
    done = subprocess.run([python, JUDGE, *(tmp_path / name for name in VARIANTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ours
    assert all(len(set(map(tuple, said))) > 20 for said in ours)
