"""Training steps of SpecForge 0.2.0 on a GPU, for `benchmarks/gpu_session.py`: bf16, FlexAttention, its Triton loss.

    python tools/specforge_gpu_step.py '{"strategy": "dflash", "device": "cuda", …}'

Its models, strategies, AdamW over fp32 masters, and Liger's kernels where it has them (DFlash); no trainer around them.
Samples are padded to the longest, as its collators do. On a CPU: fp32, sdpa, and its reference formula of the loss.
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
from specforge_step import make_config
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from gpu_turns import Step, serve_turns  # pyright: ignore[reportMissingImports]

MASK_TOKEN = 3
UNROLLED = ("eagle3", "peagle")


def prepare(request: dict[str, Any]) -> Callable[[], Step]:
    """Build draft and batch on the CPU; what is returned takes them to the device."""
    if request["device"] == "cpu":
        replace_triton()
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig  # pyright: ignore[reportMissingImports]
    from specforge.optimizer import BF16Optimizer  # pyright: ignore[reportMissingImports]
    from specforge.runtime.contracts import TrainBatch  # pyright: ignore[reportMissingImports]

    gpu, kind = request["device"] == "cuda", request["strategy"]
    dtype, attention = (torch.bfloat16, "flex_attention") if gpu else (torch.float32, "sdpa")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(draft_config(request)))
        config = AutoDraftModelConfig.from_file(str(file))
    given: dict[str, Any] = {"attention_backend": attention} if kind == "eagle3" else {}
    if kind not in UNROLLED:
        config._attn_implementation = attention
    if kind == "dflash" and gpu:
        from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels  # pyright: ignore[reportMissingImports]

        given["dflash_kernels"] = load_liger_dflash_kernels()
    torch.set_default_dtype(dtype)
    draft = AutoDraftModel.from_config(config, torch_dtype=dtype, **given)
    torch.set_default_dtype(torch.float32)
    tensors = make_batch(request, dtype)

    def make() -> Step:
        strategy = build_strategy(request, draft.to(request["device"]), dtype, attention)
        optimizer = BF16Optimizer(draft, 1e-5, total_steps=100)
        there = {name: value.to(request["device"]) for name, value in tensors.items()}
        parts = [there] if kind != "peagle" else split_samples(there, request["lengths"])
        batches = [TrainBatch(["0"], kind, part, {"target_repr": "hidden_state"}) for part in parts]

        def step() -> None:
            for batch in batches:
                strategy.forward_loss(batch).loss.backward()
            optimizer.step()

        return step

    return make


def draft_config(request: dict[str, Any]) -> dict[str, Any]:
    """Return the draft's config.json with the sizes of the request."""
    options, case = request["options"], {**request, "ttt": 7}
    config = make_config(case) | {"head_dim": request["head_dim"], "torch_dtype": "bfloat16"}
    layers = options.get("num_layers", 1)
    config["num_hidden_layers"] = layers
    if request["strategy"] in UNROLLED:
        return config
    inside = config["dflash_config"] | {"target_layer_ids": list(range(1, options["num_taps"] + 1))}
    named = ("emb_dim", "gru_hidden_dim", "markov_rank")
    inside |= {name: options[name] for name in named if name in options}
    config |= {"dflash_config": inside, "block_size": options["block_size"], "layer_types": ["full_attention"] * layers}
    config |= {"max_window_layers": layers, "num_target_layers": 36}
    return config | ({"emb_dim": options["emb_dim"]} if "emb_dim" in options else {})


def build_strategy(request: dict[str, Any], draft: Any, dtype: torch.dtype, attention: str) -> Any:
    """Return SpecForge's strategy with its training model on the device."""
    device, kind, options = request["device"], request["strategy"], request["options"]
    with torch.device(device):
        head = nn.Linear(request["hidden"], request["vocab"], bias=False, dtype=dtype).requires_grad_(False)
        embedding = nn.Embedding(request["vocab"], request["hidden"], dtype=dtype).requires_grad_(False)
    with torch.no_grad():
        head.weight[request["draft_vocab"] :] *= 0.01
        if kind in UNROLLED:
            draft.t2d.copy_(torch.arange(request["vocab"]) < request["draft_vocab"])
            draft.d2t.zero_()
    if kind == "eagle3":
        draft.embed_tokens.requires_grad_(False)
        keywords = {"length": options["ttt_length"], "attention_backend": attention}
    elif kind == "peagle":
        keywords = {"num_depths": options["num_depths"], "mask_token_id": MASK_TOKEN}
    else:
        keywords = {
            "block_size": options["block_size"],
            "num_anchors": options["num_anchors"],
            "mask_token_id": MASK_TOKEN,
        }
    if kind == "domino":
        keywords["shift_label"] = True
    strategy = make_strategy({"strategy": kind, "model": keywords}, draft, head, embedding)
    if kind not in UNROLLED:
        models = [each for each in vars(strategy).values() if hasattr(each, "attention_backend")]
        assert models, "SpecForge's training model has no attention_backend"
        for each in models:
            each.attention_backend = attention
    return strategy


def split_samples(tensors: dict[str, Tensor], lengths: list[int]) -> list[dict[str, Tensor]]:
    """Return each sample as a batch of its own, without padding: SpecForge's P-EAGLE takes one at a time."""
    found = []
    for row, length in enumerate(lengths):
        cut = {name: value[row : row + 1, :length] for name, value in tensors.items() if name != "lengths"}
        found.append({**cut, "lengths": tensors["lengths"][row : row + 1]})
    return found


def make_batch(request: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random tokens and features under SpecForge's names, padded; the last `loss_share` of each sample counts."""
    lengths, hidden = request["lengths"], request["hidden"]
    rows, width = len(lengths), max(lengths)
    taps = 3 if request["strategy"] in UNROLLED else request["options"]["num_taps"]
    places, ends = torch.arange(width), torch.tensor(lengths)[:, None]
    there = places < ends
    counted = there & (places >= (ends * (1 - request["loss_share"])).round())
    given = {"input_ids": torch.randint(request["draft_vocab"], (rows, width)), "loss_mask": counted.float()}
    features, last = (torch.randn(rows, width, count * hidden, dtype=dtype) for count in (taps, 1))
    if request["strategy"] in UNROLLED:
        more = {"attention_mask": there, "hidden_state": features, "target": last}
        return {**given, **more, **({"lengths": ends.squeeze(1)} if request["strategy"] == "peagle" else {})}
    given["hidden_states"] = features
    return {**given, "target_last_hidden_states": last} if request["strategy"] == "dspark" else given


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    serve_turns(lambda: prepare(wanted), wanted["device"])
