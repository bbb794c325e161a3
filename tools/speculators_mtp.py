"""Run speculators' MTP layer on an exported folder: python tools/speculators_mtp.py FOLDER INPUTS ANSWER (its environment).

INPUTS is a safetensors file with `input_ids` (1, S) int64, `hidden_states` (1, S, H) and `loss_mask` (1, S) int64; ANSWER
gets `logits` (T, n, V) and `losses` (T,), the mean cross-entropies by step.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.models.mtp import MTPDraftModel  # pyright: ignore[reportMissingImports]


def main(folder: str, inputs: str, answer: str) -> None:
    model = MTPDraftModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        logits, _, metrics = model(**load_file(inputs))
    losses = torch.stack([metrics[f"loss_step_{step}"] for step in range(len(logits))])
    save_file({"logits": torch.cat(logits).contiguous(), "losses": losses}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
