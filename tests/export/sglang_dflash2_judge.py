"""Runs SGLang's model on exported DFlash 2 drafts: a judge of judges.py, under SGLang's own Python.

Beside each FOLDER lies FOLDER.safetensors with `embedding`, `head`, and for every question i `features.{i}` (n, taps · H),
`anchor.{i}` (1,) and `uniforms.{i}` (places,). SGLang's model loads the files, turns the features into keys and values, and
runs the block with its convolutions; its selector takes the best path, and one that the numbers draw at temperature 0.7. Only
attention is not SGLang's: on a CPU it has no kernel that goes without a server. Returns for every folder `tokens`,
`drawn` and `q` (places, candidates) for every question, and `unset`, the parameters that no file gave a value.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.models.dflash import DFlash2DraftModel
from sglang.srt.speculative.dflash_worker_v2 import _selector_lattice
from sglang_alone import alone_on_a_cpu, load_export, run_block
from torch import Tensor
from transformers import AutoConfig

TEMPERATURE = 0.7


def said(model: DFlash2DraftModel, asked: dict[str, Tensor], question: int) -> dict[str, Any]:
    """The paths through the block after a context."""
    anchor = asked[f"anchor.{question}"]
    states = run_block(model, asked[f"features.{question}"], anchor, asked["embedding"])
    candidates, scores = _selector_lattice(model, states[None, 1:], anchor)
    paths = [
        model.candidate_selector.sample_path(
            candidate_ids=candidates,
            scores=scores,
            uniforms=asked[f"uniforms.{question}"][None],
            temperatures=torch.full((1,), TEMPERATURE),
            greedy_mask=torch.tensor([greedy]),
        )
        for greedy in (True, False)
    ]
    (tokens, _), (drawn, q) = paths
    dense = torch.zeros(len(states) - 1, len(asked["head"])).scatter_(1, candidates[0], q[0])
    return {"tokens": tokens[0].tolist(), "drawn": drawn[0].tolist(), "q": dense.tolist()}


def judged(folder: Path) -> dict[str, Any]:
    model, asked = (
        load_export(DFlash2DraftModel(AutoConfig.from_pretrained(folder)), folder),
        load_file(folder.with_suffix(".safetensors")),
    )
    unset = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    model.lm_head = SimpleNamespace(weight=asked["head"], quant_method=None, org_vocab_size=len(asked["head"]))
    questions = range(sum(name.startswith("anchor.") for name in asked))
    answers = [said(model, asked, question) for question in questions]
    return {"unset": unset, **{what: [answer[what] for answer in answers] for what in ("tokens", "drawn", "q")}}


def judge(folders: list[Path], work: Path) -> list[dict[str, Any]]:
    alone_on_a_cpu(work)
    return [judged(folder) for folder in folders]
