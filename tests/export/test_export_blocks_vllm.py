"""vLLM's own models load exported block drafts that its runner for CPUs does not serve, and propose the draft's tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from block_questions import CONTEXTS, Question, export_with_questions
from export_toys import Toys
from judge_process import PeerJudge
from vllm_wheels import fetch_modules

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HEAD_DIM = 16
"""What vLLM's kernel for norms on a CPU wants."""
DFLASH2, DSPARK, LILICORR = "DFlash2Qwen3ForCausalLM", "Qwen3DSparkForCausalLM", "LiLiCorrForCausalLM"
DRAFTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "zlab_dflash2": ("dflash2", DFLASH2, {"block_size": 7, "conv_kernel_size": 3}),
    "speculators_dflash2": ("dflash2", DFLASH2, {"block_size": 4, "selector_top_k": 8}),
    "zlab_dspark": ("dspark", DSPARK, {"block_size": 6}),
    "speculators_dspark": ("dspark", DSPARK, {"block_size": 6, "confidence_with_markov": False}),
    "sglang_lilicorr": (
        "lilicorr",
        LILICORR,
        {"lattice_size": 6, "factor_dim": 5, "candidate_topk": 8, "block_size": 6},
    ),
}
"""By the format: the strategy, vLLM's class for it, and options."""


@dataclass(frozen=True)
class Answers:
    """By the format: the questions, and vLLM's answers."""

    ours: dict[str, list[Question]]
    theirs: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(vllm_judge: PeerJudge, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    toys = Toys.make(tmp_path_factory.mktemp("vllm-blocks"))
    ours = {
        name: export_with_questions(toys, toys.strategy(strategy, head_dim=HEAD_DIM, **options), name, name)
        for name, (strategy, _, options) in DRAFTS.items()
    }
    theirs = vllm_judge.ask("blocks", [toys.folder / name for name in ours])
    return Answers(ours, dict(zip(ours, theirs, strict=True)))


def require_proposed(ours: list[Question], theirs: dict[str, Any], kind: str) -> None:
    assert theirs["class"] == kind
    assert theirs["unset"] == []
    assert theirs["tokens"] == [question.tokens for question in ours]
    assert len({json.dumps(question.tokens) for question in ours}) > len(CONTEXTS) / 2


@pytest.mark.parametrize("name", DRAFTS)
def test_vllm_proposes_the_tokens_that_the_draft_proposes(answers: Answers, name: str):
    require_proposed(answers.ours[name], answers.theirs[name], DRAFTS[name][1])


@pytest.mark.long
def test_the_class_of_xpress_of_vllm_0_33_proposes_the_tokens_that_the_draft_proposes(
    vllm_judge: PeerJudge, tmp_path: Path
):
    """Under 0.32, as 0.33 has no build for CPUs: its module is taken out of its wheel, without the kernels."""
    toys = Toys.make(tmp_path / "toys")
    draft = toys.strategy("xpress", head_dim=HEAD_DIM, block_size=6, refiner_rank=8, mlp_ratio=3, jacobi_passes=3)
    ours = export_with_questions(toys, draft, "vllm_xpress", "vllm_xpress")
    module = "vllm/model_executor/models/qwen3_xpress.py"
    shutil.copy(fetch_modules("0.33", tmp_path, [module]) / "qwen3_xpress.py", toys.folder)
    [theirs] = vllm_judge.ask("blocks", [toys.folder / "vllm_xpress"])
    require_proposed(ours, theirs, "Qwen3XPressForCausalLM")
