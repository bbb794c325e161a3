"""SGLang's own model loads exported LiLiCorr drafts and proposes the same tokens, with convolutions and without."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import HIDDEN, VOCAB, Toys
from safetensors.torch import save_file

from draftworks.export.exporting import export_draft

ROOT = Path(__file__).resolve().parents[2]
JUDGE = Path(__file__).with_name("sglang_lilicorr_judge.py")
CONTEXTS = (1, 2, 3, 5, 8, 9, 14, 20, 21, 30)
VARIANTS: dict[str, dict[str, Any]] = {
    "narrow": {"lattice_size": 6, "factor_dim": 5, "candidate_topk": 8, "block_size": 6},
    "wide": {"candidate_topk": 4, "logit_scale": 3.0, "lattice_layers": 1, "vector_eps": 1e-3, "sliding_window": 4},
    "convolved": {"conv_kernel_size": 3, "conv_group_size": 4, "block_size": 7},
}


def exported(toys: Toys, name: str) -> list[list[int]]:
    """Exports a draft with questions beside it, and returns what it proposes itself."""
    strategy, generator = toys.strategy("lilicorr", **VARIANTS[name]), torch.Generator().manual_seed(6)
    with torch.no_grad():  # so that neither the mask token nor one token alone decides the proposal
        for weight_name, weight in strategy.model.named_parameters():
            if "norm" not in weight_name:
                weight.mul_(2).add_(0.1 * torch.randn(weight.shape, generator=generator))
    draft = toys.saved(strategy, f"draft-{name}")
    assert export_draft(draft, "sglang_lilicorr", toys.folder / name, "float32").passed
    strategy = draft.build_strategy()
    asked = {"embedding": draft.parts.embedding.float(), "head": draft.parts.head.float()}
    proposals = []
    for number, rows in enumerate(CONTEXTS):
        features = {tap.name: torch.randn(rows, HIDDEN, generator=generator) for tap in draft.taps}
        known = torch.randint(VOCAB, (rows,), generator=generator)
        asked |= {f"features.{number}": torch.cat(list(features.values()), dim=-1), f"anchor.{number}": known[-1:]}
        drafter = strategy.drafter()
        drafter.extend(features, known)
        proposed = drafter.propose(strategy.draft_tokens, temperature=0.0, generator=None)
        proposals.append(proposed.tokens.tolist())
    save_file(asked, toys.folder / f"{name}.safetensors")
    return proposals


@pytest.mark.sglang
def test_sglang_proposes_the_tokens_that_the_draft_does(tmp_path: Path):
    toys = Toys.make(tmp_path)
    ours = {name: exported(toys, name) for name in VARIANTS}
    python = ROOT / ".venv-sglang" / "bin" / "python"
    done = subprocess.run([python, JUDGE, *(tmp_path / name for name in VARIANTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = dict(zip(VARIANTS, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert theirs == {name: {"unset": [], "tokens": tokens} for name, tokens in ours.items()}
    for tokens in ours.values():
        assert len(set(map(tuple, tokens))) > len(CONTEXTS) / 2
