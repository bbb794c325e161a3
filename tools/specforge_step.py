"""Training steps of SpecForge 0.2.0's own models and strategies, for `benchmarks/rivals.py`.

    .venv-specforge/bin/python tools/specforge_step.py '{"strategy": "eagle3", "length": 512, "batch": 4, …}'

Runs in an environment of its own (`make specforge-env`). Drafts, training models and losses are SpecForge's; its trainer
around them, which adds to a step, is left out: forward, backward, clipping and AdamW are called here. Its loss is a Triton
kernel, which does not run on a CPU; its reference formula in SpecForge is used instead.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from specforge_judge import make_strategy, replace_triton
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from turns import read_memory, serve_steps  # pyright: ignore[reportMissingImports]

MASK_TOKEN = 3
CLASSES = {
    "eagle3": "LlamaForCausalLMEagle3",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "domino": "DominoDraftModel",
    "dspark": "DSparkDraftModel",
}
HEADS = {
    "domino": {
        "projector_type": "domino",
        "emb_dim": 32,
        "gru_hidden_dim": 64,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
    "dspark": {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    },
}
"""What the drafts with heads have in `dflash_config`: sizes of `benchmarks/train_step.py`."""


def main() -> None:
    after_torch, case = read_memory("VmRSS"), json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    replace_triton()
    import specforge.algorithms.common.dflash_family_model  # pyright: ignore[reportMissingImports]
    import specforge.algorithms.eagle3.model  # pyright: ignore[reportMissingImports]
    import specforge.algorithms.peagle.model  # pyright: ignore[reportMissingImports]
    import specforge.modeling.auto  # pyright: ignore[reportMissingImports]
    import specforge.training.strategies.base  # noqa: F401  # pyright: ignore[reportMissingImports]

    serve_steps(lambda: make_step(case), after_torch)


def make_step(case: dict[str, Any]) -> Callable[[], object]:
    """Return a step on random features; `case` has the fields of a `Case` of `benchmarks/train_step.py`."""
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig  # pyright: ignore[reportMissingImports]
    from specforge.runtime.contracts import TrainBatch  # pyright: ignore[reportMissingImports]

    kind = case["strategy"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(make_config(case)))
        config = AutoDraftModelConfig.from_file(str(file))
    if kind not in ("eagle3", "peagle"):
        config._attn_implementation = "sdpa"
    draft = AutoDraftModel.from_config(config, torch_dtype=torch.float32)
    head = nn.Linear(case["hidden"], case["vocab"], bias=False).requires_grad_(False)
    with torch.no_grad():
        head.weight.normal_()
        head.weight[case["draft_vocab"] :] *= 0.01
    embedding = nn.Embedding(case["vocab"], case["hidden"]).requires_grad_(False)
    if kind in ("eagle3", "peagle"):
        draft.t2d.copy_(torch.arange(case["vocab"]) < case["draft_vocab"])
        draft.d2t.zero_()
        if kind == "eagle3":
            draft.embed_tokens.requires_grad_(False)
    keywords = {
        "eagle3": {"length": case["ttt"], "attention_backend": "sdpa"},
        "peagle": {"num_depths": 8, "mask_token_id": MASK_TOKEN},
    }.get(kind, {"block_size": 8, "num_anchors": 64, "mask_token_id": MASK_TOKEN})
    if kind == "domino":
        keywords["shift_label"] = True
    strategy = make_strategy({"strategy": kind, "model": keywords}, draft, head, embedding)
    batch = TrainBatch(["0"], kind, make_batch(case), {"target_repr": "hidden_state"})
    trained = [each for each in draft.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)

    def step() -> None:
        strategy.forward_loss(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_config(case: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the draft."""
    kind = case["strategy"]
    shape = {
        "architectures": [CLASSES[kind]],
        "hidden_act": "silu",
        "hidden_size": case["hidden"],
        "intermediate_size": case["intermediate"],
        "head_dim": case["hidden"] // case["heads"],
        "num_attention_heads": case["heads"],
        "num_key_value_heads": case["kv_heads"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "vocab_size": case["vocab"],
    }
    if kind in ("eagle3", "peagle"):
        layers = 1 if kind == "eagle3" else 4
        return {
            **shape,
            "model_type": "llama",
            "num_hidden_layers": layers,
            "draft_vocab_size": case["draft_vocab"],
            "torch_dtype": "float32",
        }
    inside = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 4], **HEADS.get(kind, {})}
    return {
        **shape,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "layer_types": ["full_attention"] * 2,
        "max_window_layers": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 8,
        "dflash_config": inside,
        "dtype": "float32",
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        **({"emb_dim": 32} if kind == "domino" else {}),
    }


def make_batch(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return random tokens and features under SpecForge's names; the last `loss_share` of each sample counts."""
    rows, length, hidden = case["batch"], case["length"], case["hidden"]
    ids = torch.randint(case["vocab"], (rows, length))
    mask = (torch.arange(length) >= round(length * (1 - case["loss_share"]))).float().expand(rows, length)
    features, last = torch.randn(rows, length, 3 * hidden), torch.randn(rows, length, hidden)
    given = {"input_ids": ids, "loss_mask": mask.contiguous()}
    if case["strategy"] in ("eagle3", "peagle"):
        there = torch.ones(rows, length, dtype=torch.bool)
        return {**given, "attention_mask": there, "hidden_state": features, "target": last}
    given["hidden_states"] = features
    return {**given, "target_last_hidden_states": last} if case["strategy"] == "dspark" else given


if __name__ == "__main__":
    main()
