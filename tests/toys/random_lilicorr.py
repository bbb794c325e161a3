"""Random files of a LiLiCorr draft for the embedded target, by the names of the format."""

from __future__ import annotations

import torch
from random_exports import BLOCK_SIZE, HIDDEN, RandomExport, zlab_dflash
from torch import Tensor


def sglang_lilicorr() -> RandomExport:
    places, size, wide, factors = BLOCK_SIZE - 1, 6, 9, 5
    settings = {"candidate_topk": 4, "hidden_size": size, "num_layers": 1, "num_heads": 2, "mlp_ratio": 1.5}
    settings |= {"factor_dim": factors, "logit_scale": 8.0, "vector_eps": 1e-4}
    affine = {
        "token_proj": (HIDDEN, size),
        "pass_hidden_proj": (HIDDEN, size),
        "context_proj": (HIDDEN, size),
        "feature_mlp.up_proj": (5, size),
        "feature_mlp.down_proj": (size, size),
        "layers.0.attn.out_proj": (size, size),
        "layers.0.mlp.up_proj": (size, wide),
        "layers.0.mlp.down_proj": (wide, size),
        "factor_input_proj": (3 * size, size),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (size, factors)),
    }
    tensors = {
        "slot_embedding": matrix(places, size, seed=200).view(1, 1, places, 1, size),
        "rank_embedding": matrix(4, size, seed=201).view(1, 1, 1, 4, size),
        "relative_slot_bias": matrix(2, 2 * places + 1, seed=202),
        "layers.0.attn.in_proj_weight": matrix(3 * size, size, seed=203),
        "layers.0.attn.in_proj_bias": torch.linspace(-1, 1, 3 * size),
        "same_slot_bias": torch.tensor([0.5, -0.5]),
        "feature_norm.weight": torch.ones(5),
        "feature_norm.bias": torch.linspace(-1, 1, 5),
        **{f"{name}.weight": torch.linspace(0.5, 1.5, size) for name in ("output_norm", "anchor_norm")},
        **{f"layers.0.{name}.weight": torch.linspace(0.5, 1.5, size) for name in ("attn_norm", "mlp_norm")},
    }
    for seed, (name, (inputs, outputs)) in enumerate(affine.items(), start=210):
        tensors |= {f"{name}.weight": matrix(outputs, inputs, seed), f"{name}.bias": torch.linspace(-1, 1, outputs)}
    backbone = zlab_dflash()
    named = {f"lilicorr_{key}": value for key, value in settings.items()}
    return RandomExport(
        {
            **backbone.config,
            "architectures": ["LiLiCorrDraftModel"],
            "dflash_config": {**backbone.config["dflash_config"], "projector_type": "lilicorr", **named},
        },
        {**backbone.tensors, **{f"lilicorr.{name}": tensor for name, tensor in tensors.items()}},
    )


def matrix(outputs: int, inputs: int, seed: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5
