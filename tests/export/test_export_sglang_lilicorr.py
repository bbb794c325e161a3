"""SGLang's own model loads exported LiLiCorr drafts and proposes the same tokens, with convolutions and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from export_toys import Toys
from sglang_judge_process import SGLangJudge
from sglang_questions import export_with_questions

CONTEXTS = (1, 2, 3, 5, 8, 9, 14, 20, 21, 30)
VARIANTS: dict[str, dict[str, Any]] = {
    "narrow": {"lattice_size": 6, "factor_dim": 5, "candidate_topk": 8, "block_size": 6},
    "wide": {"candidate_topk": 4, "logit_scale": 3.0, "lattice_layers": 1, "vector_eps": 1e-3, "sliding_window": 4},
    "convolved": {"conv_kernel_size": 3, "conv_group_size": 4, "block_size": 7},
}


@pytest.mark.sglang
def test_sglang_proposes_the_tokens_that_the_draft_does(sglang_judge: SGLangJudge, tmp_path: Path):
    toys = Toys.make(tmp_path)
    ours = {}
    for name, options in VARIANTS.items():
        asked = export_with_questions(toys, toys.strategy("lilicorr", **options), "sglang_lilicorr", name, CONTEXTS)
        ours[name] = [question.tokens for question in asked]
    said = sglang_judge.ask("lilicorr", [tmp_path / name for name in VARIANTS])
    theirs = dict(zip(VARIANTS, said, strict=True))
    assert theirs == {name: {"unset": [], "tokens": tokens} for name, tokens in ours.items()}
    for tokens in ours.values():
        assert len(set(map(tuple, tokens))) > len(CONTEXTS) / 2
