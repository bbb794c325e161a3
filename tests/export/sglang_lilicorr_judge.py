"""Runs SGLang's LiLiCorr head on exported drafts: `sglang_lilicorr_judge.py FOLDER …`, under SGLang's own Python.

Beside each FOLDER lies FOLDER.safetensors with `states` (n, places, H), normed, `context` (n, H), `tokens` (n, places, k), `log_probs`
(n, places, k) and `embedding`. Prints the proposals for every folder as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.models.lilicorr import LiLiCorrHead, check_head_weight_coverage
from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config
from transformers import AutoConfig

HEAD = "lilicorr."


def proposals(folder: Path) -> list[list[int]]:
    config, asked = AutoConfig.from_pretrained(folder), load_file(folder.with_suffix(".safetensors"))
    head = LiLiCorrHead(
        model_hidden_size=config.hidden_size,
        block_size=config.block_size,
        rms_norm_eps=config.rms_norm_eps,
        config=parse_lilicorr_draft_config(draft_hf_config=config),
    )
    tensors = {name: one for name, one in load_file(folder / "model.safetensors").items() if name.startswith(HEAD)}
    check_head_weight_coverage(head, set(tensors))
    head.load_state_dict({name.removeprefix(HEAD): tensor for name, tensor in tensors.items()})
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    count = len(asked["tokens"])
    chosen, _ = head.select_with_proposal(
        token_embeddings=asked["embedding"][asked["tokens"]],
        candidate_tokens=asked["tokens"],
        candidate_log_probs=asked["log_probs"],
        pass_hidden=asked["states"],
        anchor_hidden=asked["context"],
        anchor_valid=torch.ones(count),
        uniforms=torch.zeros(count, asked["tokens"].shape[1]),
        temperatures=torch.ones(count),
        greedy_mask=torch.ones(count, dtype=torch.bool),
    )
    return chosen.tolist()


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps([proposals(Path(folder)) for folder in sys.argv[1:]]))
