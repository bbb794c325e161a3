"""Training steps of speculators 0.9.0's own models and losses, for `benchmarks/rivals.py`.

    .venv-speculators/bin/python tools/speculators_step.py '{"strategy": "eagle3", "length": 512, "batch": 4, …}'

Runs in an environment of its own (`make speculators-env`). Models and losses are the library's, built as its trainer builds
them for a CPU (sdpa, eager losses); the trainer around them is left out: forward, backward, clipping and AdamW are called
here. A batch is packed into one row, as the library's collator does, and on a CPU its attention has a dense mask over all
of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from turns import read_memory, serve_steps  # pyright: ignore[reportMissingImports]

MASK_TOKEN = 3
TAPS = [2, 4, 5]
LAYERS = {"eagle3": 1, "dflash": 2}


def main() -> None:
    after_torch, case = read_memory("VmRSS"), json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    import speculators.losses  # pyright: ignore[reportMissingImports]
    import speculators.models.dflash  # pyright: ignore[reportMissingImports]
    import speculators.models.eagle3  # noqa: F401  # pyright: ignore[reportMissingImports]

    serve_steps(lambda: make_step(case), after_torch)


def make_step(case: dict[str, Any]) -> Callable[[], object]:
    """Return a step on random features; `case` has the fields of a `Case` of `benchmarks/train_step.py`."""
    from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]

    kind = case["strategy"]
    with tempfile.TemporaryDirectory() as folder:
        write_target(case, Path(folder))
        model = make_model(case, folder)
    options = {"loss_config": resolve_loss_config("kl_div" if kind == "eagle3" else "ce", "eager")}
    options |= {"ttt_steps": case["ttt"]} if kind == "eagle3" else {"max_anchors": 64 * case["batch"]}
    batch = make_batch(case)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)

    def step() -> None:
        _, loss, _ = model(**batch, **options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


def write_target(case: dict[str, Any], folder: Path) -> None:
    """Write what the library reads of a target: its config, embedding, last norm and head."""
    make_config(case, layers=8).save_pretrained(folder)
    size = (case["vocab"], case["hidden"])
    parts = {
        "model.embed_tokens.weight": torch.randn(size),
        "model.norm.weight": torch.ones(case["hidden"]),
        "lm_head.weight": torch.randn(size),
    }
    save_file(parts, folder / "model.safetensors")


def make_config(case: dict[str, Any], layers: int) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    kind = LlamaConfig if case["strategy"] == "eagle3" else Qwen3Config
    return kind(
        hidden_size=case["hidden"],
        intermediate_size=case["intermediate"],
        head_dim=case["hidden"] // case["heads"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        vocab_size=case["vocab"],
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM" if kind is LlamaConfig else "Qwen3ForCausalLM"],
    )


def make_model(case: dict[str, Any], target: str) -> torch.nn.Module:
    """Return the library's training model for a target; EAGLE-3 with a draft vocabulary, DFlash with all tokens."""
    from speculators.models.dflash.core import DFlashDraftModel  # pyright: ignore[reportMissingImports]
    from speculators.models.eagle3.core import Eagle3DraftModel  # pyright: ignore[reportMissingImports]

    config = make_config(case, LAYERS[case["strategy"]])
    places = {"verifier_name_or_path": target, "target_layer_ids": TAPS, "draft_attn_impl": "sdpa"}
    if case["strategy"] == "dflash":
        sizes = {"draft_vocab_size": case["vocab"], "block_size": 8, "mask_token_id": MASK_TOKEN}
        return DFlashDraftModel.from_training_args(config, None, None, **places, **sizes)
    drafted = torch.arange(case["vocab"]) < case["draft_vocab"]
    sizes = {"draft_vocab_size": case["draft_vocab"], "norm_before_residual": False, "ttt_steps": case["ttt"]}
    return Eagle3DraftModel.from_training_args(
        config, drafted, torch.zeros(case["draft_vocab"], dtype=torch.int64), **places, **sizes
    )


def make_batch(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return random tokens and features of all samples in one row; the last `loss_share` of each sample counts."""
    rows, length, hidden = case["batch"], case["length"], case["hidden"]
    mask = (torch.arange(length) >= round(length * (1 - case["loss_share"]))).float()
    places = torch.arange(length)
    return {
        "input_ids": torch.randint(case["draft_vocab"], (1, rows * length)),
        "loss_mask": mask.repeat(rows)[None],
        "document_ids": torch.arange(rows).repeat_interleave(length)[None],
        "position_ids": places.repeat(rows)[None],
        "hidden_states": torch.randn(1, rows * length, 3 * hidden),
        "verifier_last_hidden_states": torch.randn(1, rows * length, hidden),
    }


if __name__ == "__main__":
    main()
