"""Runs SGLang's code on exported Domino drafts: a judge of judges.py, under SGLang's own Python.

Beside each FOLDER lies FOLDER.safetensors with `rows` (n, block, H), `anchors` (n,), `embedding` and `head`. Returns the proposals
for every folder.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.domino_utils import domino_greedy_rollout
from torch import nn
from transformers import AutoConfig


def proposals(folder: Path) -> list[list[int]]:
    config, asked = AutoConfig.from_pretrained(folder), load_file(folder.with_suffix(".safetensors"))
    draft = parse_dflash_draft_config(draft_hf_config=config)
    projector = nn.Module()
    projector.prefix_gru = nn.GRU(config.hidden_size, draft.gru_hidden_dim, batch_first=True, bias=False)
    narrow = nn.Linear(config.hidden_size + draft.gru_hidden_dim, draft.emb_dim, bias=False)
    projector.embed_proj = nn.Sequential(narrow, nn.SiLU(), nn.Linear(draft.emb_dim, config.vocab_size, bias=False))
    tensors = load_file(folder / "model.safetensors")
    ours = {name: tensor for name, tensor in tensors.items() if name.startswith(("prefix_gru.", "embed_proj."))}
    projector.load_state_dict(ours)
    tokens = domino_greedy_rollout(
        draft_hidden=asked["rows"],
        bonus_tokens=asked["anchors"],
        target_embedding=nn.Embedding.from_pretrained(asked["embedding"]),
        lm_head_weight=asked["head"],
        prefix_gru=projector.prefix_gru,
        embed_proj=projector.embed_proj,
        vocab_size=config.vocab_size,
        shift_label=draft.shift_label,
        candidate_pool_size=0,
        in_cuda_graph=False,
    )
    return tokens.tolist()


def judge(folders: list[Path], work: Path) -> list[list[list[int]]]:
    return [proposals(folder) for folder in folders]
