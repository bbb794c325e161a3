"""Tiny random targets with a multi-token-prediction (MTP) layer of their own, under the names of published checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from model_families import HIDDEN, LAYERS, VOCAB, save_family
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.draft_io import save_draft
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.export.canonical import CanonicalDraft
from draftworks.strategies.mtp.options import MtpOptions
from draftworks.strategies.mtp.strategy import MtpStrategy
from draftworks.targets.resolve import digest_target_files

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe", "deepseek_v3")
SHARD, INDEX = "model-mtp.safetensors", "model.safetensors.index.json"
_QWEN = ("mtp.fc", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding", "mtp.norm", "mtp.layers.0.")
_OWN = f"model.layers.{LAYERS}."
_DEEPSEEK = (f"{_OWN}eh_proj", f"{_OWN}hnorm", f"{_OWN}enorm", f"{_OWN}shared_head.norm", _OWN)
"""Names of the projection, the norms of state, token and output, and what those of the layer begin with."""


def save_target_with_mtp(kind: str, folder: Path, **changes: Any) -> TargetFiles:
    """Write a target of a family with an MTP layer of tensors like those of its last layer, in a second file.

    Args:
        changes: of the target's config.
    """
    target = save_family(kind, folder, **changes)
    write_mtp(kind, folder)
    return digest_target_files(target)


def write_mtp(kind: str, folder: Path, seed: int = 3) -> dict[str, Tensor]:
    """Write the MTP layer's file and the index, and return its tensors."""
    whole = load_file(folder / "model.safetensors")
    names = _DEEPSEEK if kind == "deepseek_v3" else _QWEN
    tensors = draw_mtp(whole, names, seed)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    weight_map = dict.fromkeys(whole, "model.safetensors") | dict.fromkeys(tensors, SHARD)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def draw_mtp(whole: dict[str, Tensor], names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    fc, *norms, layer = names
    last = re.compile(rf"^.*\blayers\.{LAYERS - 1}\.(.*)$")
    found = {m[1]: tensor for name, tensor in sorted(whole.items()) if (m := last.match(name))}
    tensors = {f"{layer}{name}": _draw_like(name, tensor, generator) for name, tensor in found.items()}
    tensors[f"{fc}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2
    centre = 1.0 if names is _DEEPSEEK else 0.0  # Qwen's norms add one to their weights
    tensors |= {f"{norm}.weight": centre + 0.3 * torch.randn(HIDDEN, generator=generator) for norm in norms}
    if names is _DEEPSEEK:
        copies = (f"{_OWN}embed_tokens.weight", f"{_OWN}shared_head.head.weight")
        tensors |= {name: torch.randn(VOCAB, HIDDEN, generator=generator) for name in copies}
    return tensors


def _draw_like(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    scale = 0.3 if tensor.ndim == 1 else 0.15
    noise = scale * torch.randn(tensor.shape, generator=generator)
    return noise + tensor.mean().round() if "norm" in name else noise


def mtp(parts: TargetParts, samples: object = None, **options: object) -> DraftStrategy:
    return MtpStrategy(MtpOptions(**{"num_steps": 4, **options}), parts, None, seed=1)


def save_tuned(target: TargetFiles, folder: Path, change: float) -> CanonicalDraft:
    """A draft whose weights are those of the target's layer, each changed a little."""
    strategy = mtp(TargetParts.load(target), num_steps=3)
    with torch.no_grad():
        for weight in strategy.model.parameters():
            weight.add_(change)
    save_draft(folder, strategy, target.digest)
    return CanonicalDraft.load(folder, target)


def draw_samples(lengths: tuple[int, ...] = (9, 13, 6)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(VOCAB, (length,), generator=generator),
            "loss_mask": torch.arange(length) > 2,
            "last": torch.randn(length, HIDDEN, generator=generator),
        }
        for length in lengths
    ]


def sharded_step(rank: int, target: TargetFiles, out: Path) -> None:
    """What one of two ranks does: its own sample; rank 0 writes the whole gradients."""
    strategy = mtp(TargetParts.load(target))
    fully_shard(strategy.model, mesh=init_device_mesh("cpu", (2,)))
    batch = strategy.collate([draw_samples()[rank]], [str(rank)])
    (strategy.forward_loss(batch, StepContext(training=True)).loss_sum * 2).backward()  # FSDP averages over two ranks
    whole = {name: weight.grad.full_tensor() for name, weight in strategy.model.named_parameters()}
    if rank == 0:
        save_file(whole, out)
