"""Runs SGLang's model on exported DFlash 2 drafts: `sglang_dflash2_judge.py FOLDER …`, under SGLang's own Python.

Beside each FOLDER lies FOLDER.safetensors with `embedding`, `head`, and for every question i `features.{i}` (n, taps · H),
`anchor.{i}` (1,) and `uniforms.{i}` (places,). SGLang's model loads the files, turns the features into keys and values, and
runs the block with its convolutions; its selector takes the best path, and one that the numbers draw at temperature 0.7. Only
attention is not SGLang's: on a CPU it has no kernel that goes without a server. Prints for every folder, as JSON, `tokens`,
`drawn` and `q` (places, candidates) for every question, and `unset`, the parameters that no file gave a value.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the same without a compiler

import torch
from safetensors.torch import load_file
from sglang.srt.models.dflash import DFlash2DraftModel
from sglang.srt.speculative.dflash_worker_v2 import _selector_lattice
from sglang_alone import Cache, PlainAttention, alone_on_a_cpu, load_export
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

TEMPERATURE = 0.7


def write_context(model: DFlash2DraftModel, features: Tensor, cache: Cache) -> None:
    """Put keys and values of the context (n, taps · H) where attention finds them, as SGLang's worker does."""
    positions, hidden = torch.arange(len(features)), model.project_target_hidden(features)
    for layer in model.layers:
        attention = layer.self_attn
        key, value = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, hidden))
        key = attention.apply_k_rope(positions, attention.apply_k_norm(key))
        heads = (-1, attention.num_kv_heads, attention.head_dim)
        cache.set_kv_buffer(attention.attn, None, key.view(heads), value.view(heads))


def said(model: DFlash2DraftModel, asked: dict[str, Tensor], question: int, mask_token: int) -> dict[str, Any]:
    """The paths through the block after a context."""
    cache, features, anchor = Cache(), asked[f"features.{question}"], asked[f"anchor.{question}"]
    write_context(model, features, cache)
    attentions = [layer.self_attn.attn for layer in model.layers]
    for layer, attention in zip(model.layers, attentions):
        layer.self_attn.attn = PlainAttention(attention, cache)
    rows = len(features)
    block = torch.full((model.block_size,), mask_token)
    block[0] = anchor[0]
    embedded = F.embedding(block, asked["embedding"])
    states = model(block, torch.arange(rows, rows + len(block)), None, input_embeds=embedded).hidden_states
    for layer, attention in zip(model.layers, attentions):
        layer.self_attn.attn = attention
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
    dense = torch.zeros(len(block) - 1, len(asked["head"])).scatter_(1, candidates[0], q[0])
    return {"tokens": tokens[0].tolist(), "drawn": drawn[0].tolist(), "q": dense.tolist()}


def judged(folder: Path) -> dict[str, Any]:
    model, asked = (
        load_export(DFlash2DraftModel(AutoConfig.from_pretrained(folder)), folder),
        load_file(folder.with_suffix(".safetensors")),
    )
    unset = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    model.lm_head = SimpleNamespace(weight=asked["head"], quant_method=None, org_vocab_size=len(asked["head"]))
    mask_token = model.draft_config.mask_token_id
    questions = range(sum(name.startswith("anchor.") for name in asked))
    return {"unset": unset, "answers": [said(model, asked, question, mask_token) for question in questions]}


if __name__ == "__main__":
    with torch.no_grad(), tempfile.TemporaryDirectory() as work:
        alone_on_a_cpu(work)
        print(json.dumps([judged(Path(folder)) for folder in sys.argv[1:]]))
