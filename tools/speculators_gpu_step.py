"""Training steps of speculators 0.9.0 on a GPU, for `benchmarks/gpu_session.py`: compiled, FlexAttention, fused losses.

    python tools/speculators_gpu_step.py '{"strategy": "dflash", "device": "cuda", …}'

Its models and losses as its trainer builds and calls them on one GPU: fp32 weights under autocast to bf16, clipping, and
torch's fused AdamW instead of its Muon. A batch is packed into one row, as its collator does, and blocks are drawn for
the row as a whole: as many as all samples together have with us. On a CPU: fp32, sdpa, eager losses.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from gpu_turns import Step, serve_turns  # pyright: ignore[reportMissingImports]

MASK_TOKEN = 3
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "peagle": "PEagleDraftModel",
    "dflash2": "DFlash2DraftModel",
    "xpress": "XPressDraftModel",
}
LOSSES = {"dflash": "ce", "xpress": '{"ce": 0.1, "tv": 0.9}'}
"""Its defaults; `kl_div` for all others."""
UNROLLED = ("eagle3", "peagle")


def prepare(request: dict[str, Any]) -> Callable[[], Step]:
    """Build model and batch on the CPU; what is returned takes them to the device."""
    kind, gpu = request["strategy"], request["device"] == "cuda"
    module = importlib.import_module(f"speculators.models.{kind}.core")
    model_class = getattr(module, CLASSES[kind])
    with tempfile.TemporaryDirectory() as folder:
        write_target(request, Path(folder))
        model = make_model(model_class, request, folder)
    options = request["options"]
    given = {"loss_fn": LOSSES.get(kind, "kl_div"), "loss_implementation": "fused" if gpu else "eager"}
    given |= {"ttt_steps": options.get("ttt_length"), "ttt_step_loss_decay": options.get("step_decay")}
    if "num_anchors" in options:
        given["max_anchors"] = options["num_anchors"] * len(request["lengths"])
    called, _ = model_class.get_trainer_kwargs(**given)
    tensors = make_batch(request, torch.bfloat16 if gpu else torch.float32)

    def make() -> Step:
        model.to(request["device"]).train()
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=gpu)
        batch = {name: value.to(request["device"]) for name, value in tensors.items()}

        def step() -> None:
            with torch.autocast(request["device"], dtype=torch.bfloat16, enabled=gpu):
                _, loss, _ = model(**batch, **called)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()

        return step

    return make


def make_config(request: dict[str, Any], layers: int) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    kind = LlamaConfig if request["strategy"] in UNROLLED else Qwen3Config
    return kind(
        hidden_size=request["hidden"],
        intermediate_size=request["intermediate"],
        head_dim=request["head_dim"],
        num_attention_heads=request["heads"],
        num_key_value_heads=request["kv_heads"],
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        vocab_size=request["vocab"],
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM" if kind is LlamaConfig else "Qwen3ForCausalLM"],
    )


def write_target(request: dict[str, Any], folder: Path) -> None:
    """Write what the library reads of a target: its config, embedding, last norm and head."""
    make_config(request, layers=36).save_pretrained(folder)
    embedding, head = (torch.randn(request["vocab"], request["hidden"], dtype=torch.bfloat16) for _ in range(2))
    head *= request["hidden"] ** -0.5
    head[request["draft_vocab"] :] *= 0.01
    parts = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(request["hidden"]),
        "lm_head.weight": head,
    }
    save_file(parts, folder / "model.safetensors")


def make_model(model_class: Any, request: dict[str, Any], target: str) -> torch.nn.Module:
    """Return the library's training model; EAGLE-3 and P-EAGLE with a draft vocabulary, the others with all tokens."""
    options, kind = request["options"], request["strategy"]
    taps = 3 if kind in UNROLLED else options["num_taps"]
    config = make_config(request, options.get("num_layers", 1))
    attention = "simple_flex_attention" if request["device"] == "cuda" else "sdpa"
    given = {
        "verifier_name_or_path": target,
        "target_layer_ids": list(range(1, taps + 1)),
        "draft_attn_impl": attention,
    }
    given |= {"mask_token_id": MASK_TOKEN}
    if kind not in UNROLLED:
        sizes = {"draft_vocab_size": request["vocab"], "block_size": options["block_size"]}
        sizes |= {name: options[name] for name in ("markov_rank", "selector_rank", "selector_top_k") if name in options}
        if "refiner_rank" in options:
            sizes["xpress_rank"] = options["refiner_rank"]
        return model_class.from_training_args(config, None, None, **given, **sizes)
    drafted = torch.arange(request["vocab"]) < request["draft_vocab"]
    sizes = {"draft_vocab_size": request["draft_vocab"], "norm_before_residual": False}
    sizes |= {"ttt_steps": options.get("ttt_length", 1), "num_depths": options.get("num_depths", 1)}
    offsets = torch.zeros(request["draft_vocab"], dtype=torch.int64)
    return model_class.from_training_args(config, drafted, offsets, **given, **sizes)


def make_batch(request: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random tokens and features of all samples in one row; the last `loss_share` of each sample counts."""
    lengths, hidden = request["lengths"], request["hidden"]
    taps = 3 if request["strategy"] in UNROLLED else request["options"]["num_taps"]
    places = [torch.arange(length) for length in lengths]
    counted = [each >= round(len(each) * (1 - request["loss_share"])) for each in places]
    tokens = sum(lengths)
    return {
        "input_ids": torch.randint(request["draft_vocab"], (1, tokens)),
        "loss_mask": torch.cat(counted).float()[None],
        "document_ids": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        "position_ids": torch.cat(places)[None],
        "hidden_states": torch.randn(1, tokens, taps * hidden, dtype=dtype),
        "verifier_last_hidden_states": torch.randn(1, tokens, hidden, dtype=dtype),
    }


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    serve_turns(lambda: prepare(wanted), wanted["device"])
