"""Trains an EAGLE-3 draft with the real speculators library and its defaults, for tests of importing its checkpoints.

Runs in an environment of its own (`make speculators-env`), so it imports nothing of this project:

    .venv-speculators/bin/python tools/speculators_train.py TARGET FOLDER [FLAG ...]

Writes random features of TARGET into FOLDER/data and trains on them for one epoch, with the FLAGs of `speculators
train`; its checkpoints are in FOLDER/checkpoints. The library asks for an accelerator in three places, which are
patched to the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file

SAMPLES, LENGTH, PROMPT = 12, 40, 8
CPU = torch.device("cpu")
ON_A_CPU = ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--hidden-states-dtype", "float32"]
SHORT = ["--optimizer", "adamw", "--lr", "0.01", "--epochs", "1", "--num-workers", "0", "--on-missing", "raise"]


def write_features(target: Path, folder: Path) -> None:
    """Write features in the library's offline layout.

    Per sample these are the input streams of layers 2, L/2 and L-3, and the last stream before its norm.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(5)
    (folder / "hidden_states").mkdir(parents=True)
    rows = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for sample in range(SAMPLES):
        tokens = torch.randint(config["vocab_size"] // 8, (LENGTH,), generator=generator)
        states = torch.randn(LENGTH, 4, config["hidden_size"], generator=generator)
        save_file({"token_ids": tokens, "hidden_states": states}, folder / "hidden_states" / f"hs_{sample}.safetensors")
        rows["input_ids"].append(tokens.tolist())
        rows["loss_mask"].append([int(place >= PROMPT) for place in range(LENGTH)])
        rows["seq_len"].append(LENGTH)
    dataset = Dataset.from_dict(rows)
    dataset.set_format("torch", columns=["input_ids", "loss_mask"])
    dataset.save_to_disk(str(folder))
    counts = torch.tensor(rows["input_ids"])[:, PROMPT:].flatten().bincount()
    torch.save({token: int(count) for token, count in enumerate(counts) if count}, folder / "token_freq.pt")


def run_on_the_cpu() -> None:
    accelerator = torch.accelerator
    accelerator.current_accelerator = lambda *args, check_available=False: None if check_available else CPU
    accelerator.is_available = lambda: False
    accelerator.synchronize = accelerator.set_device_index = lambda *args: None
    import speculators.train.trainer as trainer  # pyright: ignore[reportMissingImports]

    trainer.get_local_rank = lambda: CPU


def main() -> None:
    target, folder, *flags = sys.argv[1:]
    write_features(Path(target), Path(folder) / "data")
    run_on_the_cpu()
    from speculators.train.cli import main as train  # pyright: ignore[reportMissingImports]
    from speculators.train.config import TrainConfig  # pyright: ignore[reportMissingImports]

    places = [
        "--verifier-name-or-path",
        target,
        "--data-path",
        f"{folder}/data",
        "--save-path",
        f"{folder}/checkpoints",
    ]
    train(TrainConfig.resolve([*places, *ON_A_CPU, *SHORT, *flags]))


if __name__ == "__main__":
    main()
