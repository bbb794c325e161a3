"""Runs SGLang's model on exported DSpark drafts: a judge of judges.py, under SGLang's own Python.

Beside each FOLDER lies FOLDER.safetensors with `embedding`, `head`, and for every question i `features.{i}` (n, taps · H) and
`anchor.{i}` (1,). SGLang's model loads the files, turns the features into keys and values, and runs the block; its sampler says the
tokens. Only attention is not SGLang's: on a CPU it has no kernel that goes without a server. Returns for every folder
`tokens` and `confidence` for every question, and `unset`, the parameters that no file gave a value.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.models.dspark import DSparkDraftModel
from sglang.srt.speculative.dspark_components.dspark_config import resolve_runtime_config
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise
from sglang.srt.speculative.dspark_components.dspark_draft_sampler import DsparkDraftSampler
from sglang.srt.speculative.spec_tp_sync import SpecTpSync
from sglang_alone import Cache, PlainAttention, alone_on_a_cpu, load_export
from torch import Tensor, nn
from transformers import AutoConfig


def said(model: DSparkDraftModel, asked: dict[str, Tensor], question: int, mask_token: int) -> SimpleNamespace:
    """Tokens and confidences of the block after a context."""
    cache, features, anchor = Cache(), asked[f"features.{question}"], asked[f"anchor.{question}"]
    attentions = [layer.self_attn.attn for layer in model.layers]
    for layer, attention in zip(model.layers, attentions):
        layer.self_attn.attn = PlainAttention(attention, cache)
    rows, gamma = len(features), model.gamma
    model.write_target_hidden_kv(
        target_hidden=features, pool=cache, positions=torch.arange(rows), cache_loc=torch.arange(rows)
    )
    block = torch.full((gamma,), mask_token)
    block[0] = anchor[0]
    states = model(block, torch.arange(rows, rows + gamma), None, input_embeds=model.forward_embed(block)).hidden_states
    for layer, attention in zip(model.layers, attentions):
        layer.self_attn.attn = attention
    sampler = DsparkDraftSampler(
        model=model,
        gamma=gamma,
        max_bs=1,
        device="cpu",
        noise=DraftNoise(key=1, offset=torch.zeros(1, dtype=torch.int64)),
        tp_sync=SpecTpSync(get_tp_group()),
        greedy_draft=True,
    )
    sampler(states, block)
    confidence = [] if sampler.confidence_out is None else sampler.confidence_out[0].tolist()
    return SimpleNamespace(tokens=sampler.out.tolist(), confidence=confidence)


def judged(folder: Path) -> dict[str, Any]:
    model, asked = (
        load_export(DSparkDraftModel(AutoConfig.from_pretrained(folder)), folder),
        load_file(folder.with_suffix(".safetensors")),
    )
    unset = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    vocab, width = asked["head"].shape
    head = SimpleNamespace(weight=asked["head"], quant_method=None, org_vocab_size=vocab)
    model.attach_shared_modules(embed_tokens=nn.Embedding.from_pretrained(asked["embedding"]), lm_head=head)
    runtime = resolve_runtime_config(
        draft_hf_config=model.config, speculative_num_draft_tokens=None, target_vocab_size=vocab
    )
    assert runtime.gamma == model.gamma
    questions = range(sum(name.startswith("anchor.") for name in asked))
    answers = [said(model, asked, question, runtime.mask_token_id) for question in questions]
    return {
        "tokens": [answer.tokens for answer in answers],
        "confidence": [answer.confidence for answer in answers],
        "unset": unset,
    }


def judge(folders: list[Path], work: Path) -> list[dict[str, Any]]:
    alone_on_a_cpu(work)
    return [judged(folder) for folder in folders]
