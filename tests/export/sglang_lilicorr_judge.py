"""Runs SGLang's model on exported LiLiCorr drafts: a judge of judges.py, under SGLang's own Python.

Beside each FOLDER lies FOLDER.safetensors with the questions of `test_export_sglang_blocks.py`. SGLang's model loads the
files and runs the block, with its convolutions if it has them; its head takes the best path through the candidates. Only
attention is not SGLang's: on a CPU it has no kernel that goes without a server. Returns for every folder `tokens`
for every question, and `unset`, the parameters that no file gave a value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.models.lilicorr import LiLiCorrDraftModel
from sglang_alone import alone_on_a_cpu, load_export, run_block
from torch import Tensor
from transformers import AutoConfig


def propose(model: LiLiCorrDraftModel, asked: dict[str, Tensor], question: int) -> list[int]:
    features, head = asked[f"features.{question}"], model.lilicorr
    states = run_block(model, features, asked[f"anchor.{question}"], asked["embedding"])[None, 1:]
    best = (states @ asked["head"].T).log_softmax(-1).topk(head.candidate_topk, dim=-1)
    chosen, _ = head.select_with_proposal(
        token_embeddings=asked["embedding"][best.indices],
        candidate_tokens=best.indices,
        candidate_log_probs=best.values,
        pass_hidden=states,
        anchor_hidden=model.project_target_hidden(features)[-1:],
        anchor_valid=torch.ones(1),
        uniforms=torch.zeros(1, states.shape[1]),
        temperatures=torch.ones(1),
        greedy_mask=torch.ones(1, dtype=torch.bool),
    )
    return chosen[0].tolist()


def judged(folder: Path) -> dict[str, Any]:
    model = load_export(LiLiCorrDraftModel(AutoConfig.from_pretrained(folder)), folder)
    unset = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    asked = load_file(folder.with_suffix(".safetensors"))
    questions = range(sum(name.startswith("anchor.") for name in asked))
    return {"unset": unset, "tokens": [propose(model, asked, question) for question in questions]}


def judge(folders: list[Path], work: Path) -> list[dict[str, Any]]:
    alone_on_a_cpu(work)
    return [judged(folder) for folder in folders]
